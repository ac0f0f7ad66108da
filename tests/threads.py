"""Calls from several threads at the same time."""

import contextlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

CALLS, THREADS = 40, 4


def in_threads(call, cases):
    """(case, what the call gave) of 40 calls with the cases by turns, from four threads."""
    given = list(itertools.islice(itertools.cycle(cases), CALLS))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds; threads change places in the middle of most calls
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(zip(given, pool.map(call, given), strict=True))
    finally:
        sys.setswitchinterval(interval)


@contextlib.contextmanager
def torch_threads(count):
    """Set the number of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
