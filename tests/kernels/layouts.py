"""Builds ragged steps over a shuffled, poisoned KV store: what kernels and models are tested with."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.interface import StepLayout


class Part(NamedTuple):
    """One sequence in a step: keys stored before it, and new tokens."""

    num_before: int
    num_new: int


@dataclass
class Pages:
    """Block tables for some sequences, in shuffled order, out of a pool with blocks to spare."""

    block_size: int
    tables: list[list[int]]
    num_blocks: int
    lengths: list[int]  # what each sequence will hold in the end

    @staticmethod
    def shuffled(lengths: list[int], block_size: int, seed: int, num_spare: int = 3) -> "Pages":
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + num_spare
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        tables = []
        for count in needed:
            tables.append(order[:count])
            order = order[count:]
        return Pages(block_size, tables, num_blocks, lengths)

    def slot(self, sequence: int, position: int) -> int:
        return self.tables[sequence][position // self.block_size] * self.block_size + position % self.block_size

    def layout(self, parts: dict[int, Part], device: str = "cpu") -> StepLayout:
        """One step that computes these parts, in this order. Unused table entries name no block at all."""
        positions, slots, starts, lengths, tables, max_lengths = [], [], [0], [], [], []
        width = max(len(self.tables[sequence]) for sequence in parts)
        for sequence, part in parts.items():
            places = range(part.num_before, part.num_before + part.num_new)
            positions += list(places)
            slots += [self.slot(sequence, position) for position in places]
            max_lengths += [self.lengths[sequence]] * part.num_new
            starts.append(len(positions))
            lengths.append(places.stop)
            table = self.tables[sequence]
            tables.append(table + [2**30] * (width - len(table)))
        return StepLayout(
            positions=torch.tensor(positions, device=device),
            slots=torch.tensor(slots, device=device),
            tables=torch.tensor(tables, dtype=torch.int32, device=device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            max_lengths=torch.tensor(max_lengths, device=device),
        )


def fill(store: Tensor, layer: int, pages: Pages, lengths: list[int], generator: torch.Generator) -> None:
    """Random keys and values where the sequences have any; everything else stays as it is."""
    for sequence, length in enumerate(lengths):
        for position in range(length):
            slot = pages.slot(sequence, position)
            values = torch.randn(store.shape[2], *store.shape[4:], generator=generator).to(store.dtype)
            store[slot // pages.block_size, layer, :, slot % pages.block_size] = values
