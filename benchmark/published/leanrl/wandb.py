"""Prints the speeds that LeanRL logs, and ends the program SPEED_SECONDS after the first."""

import os
import sys
import time

ends = []


def init(**options):
    pass


def log(content, step):
    print(f"step {step}, speed {content['speed']:.1f} steps/s", flush=True)
    ends.append(time.time() + float(os.environ.get("SPEED_SECONDS", 8)))
    if time.time() >= ends[0]:
        sys.stdout.flush()
        os._exit(0)
