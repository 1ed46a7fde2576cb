"""A script that starts processes: a pool, a queue, a spawned child that has a loader, and a subprocess."""

import concurrent.futures
import multiprocessing
import subprocess
import sys

import torch
from torch.utils.data import DataLoader


def square(number):
    return number * number


def validate(answers, seed):
    torch.manual_seed(seed)
    loader = DataLoader(torch.arange(12.0), batch_size=4, shuffle=True, num_workers=1)
    answers.put([batch.tolist() for batch in loader])


def main():
    torch.manual_seed(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(square, range(8)))
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as executor:
        print(list(executor.map(square, range(4))))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=validate, args=(answers, 9))
    child.start()
    loader = DataLoader(torch.arange(32.0), batch_size=4, shuffle=True, num_workers=2)
    for batch in loader:
        print(batch.tolist())
    print(answers.get(), child.join(), child.exitcode)
    print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
