"""Count USR1, saying so each time, until something ends this process."""

import signal
import sys

count = 0


def counted(number: int, frame: object) -> None:
    global count
    count += 1
    sys.stdout.write(f"signal {count}\n")


signal.signal(signal.SIGUSR1, counted)
sys.stdout.write("ready\n")
while True:
    signal.pause()
