"""Count USR1, saying so each time, until something ends this process."""

import os
import signal

count = 0


def counted(number: int, frame: object) -> None:
    global count
    count += 1
    os.write(1, b"signal %d\n" % count)  # a buffered file may be amid its own write


signal.signal(signal.SIGUSR1, counted)
os.write(1, b"ready\n")
while True:
    signal.pause()
