"""Hold ports that somebody else wants: one mute, the next one answering with a line of its own, and so on."""

import json
import socket
import sys
import threading

address, ports = sys.argv[1], json.loads(sys.argv[2])


def answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.sendall(b"SSH-2.0-stranger\r\n")
        connection.close()


for index, port in enumerate(ports):
    listener = socket.create_server((address, port))
    if index % 2:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    else:
        globals()[f"mute{port}"] = listener
sys.stdout.write("taken\n")
sys.stdout.flush()
threading.Event().wait()
