"""Uploads on a stream of their own, beside work that is launched and has not begun."""

import numpy as np
import torch

from quire.kernels.transfers import PinnedUpload

CYCLES = 200_000_000  # a tenth of a second, in which the device does nothing
DEVICE = torch.device("cuda")
SHAPE = (1 << 10, 1 << 10)


def test_an_upload_does_not_overwrite_what_earlier_work_has_in_its_memory() -> None:
    earlier = torch.ones(SHAPE, dtype=torch.int32, device=DEVICE)
    address = earlier.data_ptr()
    torch.cuda._sleep(CYCLES)
    total = earlier.sum()
    del earlier
    made = PinnedUpload(SHAPE, torch.int32, DEVICE)
    made.lines[:] = 7
    with made.uploaded(len(made)) as uploaded:
        assert uploaded.data_ptr() == address, "the memory that was let go"
        later = uploaded.sum()
    assert (int(total), int(later)) == (SHAPE[0] * SHAPE[1], 7 * SHAPE[0] * SHAPE[1])


def test_an_upload_waits_for_what_reads_the_one_before() -> None:
    """Though nobody has waited for its outcome: its step was given up."""
    made, sums = PinnedUpload(SHAPE, torch.int32, DEVICE), []
    for value in range(1, 4):
        made.lines[:] = value
        with made.uploaded(len(made)) as uploaded:
            torch.cuda._sleep(CYCLES)
            sums.append(uploaded.sum())
    assert [int(each) for each in sums] == [value * SHAPE[0] * SHAPE[1] for value in range(1, 4)]


def test_lines_are_uploaded_while_the_device_computes() -> None:
    made = PinnedUpload((4, 3), torch.int32, DEVICE)
    torch.cuda.synchronize()
    made.lines[:] = np.arange(12).reshape(4, 3)
    torch.cuda._sleep(10 * CYCLES)
    with made.uploaded(2) as uploaded:
        assert made._copied is not None
        made._copied.synchronize()
        assert not torch.cuda.current_stream().query(), "the copy waited for all that was launched"
        found = uploaded.cpu()
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]
