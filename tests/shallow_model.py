"""The default model cut down to two layers, for tests in which a real file and tokenizer matter but not the text.

A step takes a tenth of the time and a start half of it. What it generates is fluent in no language.
"""

import os
from pathlib import Path

from quire.catalog.names import DEFAULT_MODEL
from quire.catalog.store import fetching, ignore, present

NUM_LAYERS = 2
WRITTEN_ANEW = ("GGUF.", "general.architecture", "llama.block_count")


def write_shallow_model(source: Path, cache: Path) -> Path:
    """The shallow model as the default one of this cache folder; written once, found there by later runs."""
    folder = cache / "quire" / "models"
    target = folder / DEFAULT_MODEL.file_name
    with fetching(folder, ignore) as scratch:
        if not present(DEFAULT_MODEL, folder):
            _write(source, scratch / target.name)
            (scratch / target.name).replace(target)
    return target


def _write(source: Path, target: Path) -> None:
    """Copy a GGUF file with its first layers only; padded to the size by which quire knows the default model."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter  # only where the file is not written yet

    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    writer.add_block_count(NUM_LAYERS)
    for field in reader.fields.values():
        if not field.name.startswith(WRITTEN_ANEW):
            kind = field.types[0]
            item = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    for tensor in reader.tensors:
        layer = tensor.name.split(".")[1]
        if not layer.isdecimal() or int(layer) < NUM_LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(target, DEFAULT_MODEL.size_bytes)
