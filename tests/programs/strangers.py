"""Hold ports that somebody else wants: one mute, the next one answering with words of its own, and
so on.

Prints the first line of every call, with the port that it came to.
"""

import contextlib
import json
import socket
import sys
import threading

address = sys.argv[1]
ports = json.loads(sys.argv[2])
printing = threading.Lock()


def say(text: str) -> None:
    with printing:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def answer(connection: socket.socket, *, answers: bool) -> None:
    port = connection.getsockname()[1]
    with connection, contextlib.suppress(ConnectionError), connection.makefile("rb") as caller:
        # The answer comes after the report, so that whoever has heard a stranger is in its report.
        say(json.dumps({"port": port, "heard": caller.readline().decode(errors="replace")}))
        if answers:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        caller.read()


def listen(listener: socket.socket, *, answers: bool) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(
            target=answer, args=(connection,), kwargs={"answers": answers}, daemon=True
        ).start()


for index, port in enumerate(ports):
    listener = socket.create_server((address, port))
    threading.Thread(
        target=listen, args=(listener,), kwargs={"answers": index % 2 == 1}, daemon=True
    ).start()
say("taken")
threading.Event().wait()
