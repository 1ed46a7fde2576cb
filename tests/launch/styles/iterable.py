"""An iterable dataset whose workers share out a stream, with a collate function of the script's own."""

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Ragged lines; each worker reads every n-th."""

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(start, 50, step):
            yield torch.arange(number % 5 + 1)


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), [len(sample) for sample in samples]


if __name__ == "__main__":
    torch.manual_seed(4)
    table = torch.nn.Embedding(8, 4)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for epoch in range(2):
        for tokens, lengths in DataLoader(Stream(), batch_size=4, num_workers=2, collate_fn=padded):
            loss = table(tokens).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(epoch, tuple(tokens.shape), lengths, loss.item())
