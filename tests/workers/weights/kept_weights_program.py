"""Loads a model on a GPU with a weight keeper, as a rank does, says what it found, and ends as it is told.

python kept_weights_program.py FOLDER KEEPER kill|fault|write|end
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from workers.families import load_model
from workers.memory import device_memory
from workers.memory.device_memory import DeviceWeights
from workers.parallel.group import Group
from workers.weights.checksum import checksum
from workers.weights.kept import KeptWeights
from workers.weights.source import WeightSource

FOLDER, KEEPER, END = sys.argv[1:]
GPU = torch.device("cuda", 0)


def main() -> None:
    device_memory.PIECE_BYTES = 2 << 20  # so that a tiny model has several pieces, and tensors that lie in two
    tensors, told, memories = [], list[str](), []
    empty, new, of = WeightSource.empty, DeviceWeights.new, DeviceWeights.of

    def noted(source: WeightSource, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = empty(source, *shape, dtype=dtype)
        if tensor.device == GPU:
            tensors.append(tensor)
        return tensor

    def note(make: Any) -> Any:
        def made(*arguments: Any) -> DeviceWeights:
            memories.append(make(*arguments))
            return memories[-1]

        return made

    WeightSource.empty = noted  # type: ignore[method-assign]
    DeviceWeights.new, DeviceWeights.of = note(new), note(of)  # type: ignore[method-assign]
    torch.zeros(1, device=GPU)
    free = torch.cuda.mem_get_info(GPU)[0]
    kept = KeptWeights(Path(KEEPER), Group(), GPU, told.append) if KEEPER else None
    arguments = {"dtype": torch.bfloat16, "device": GPU, "max_positions": 64}
    model = load_model(FOLDER, group=Group(), kept=kept, **arguments)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info(GPU)[0]
    parts = [tensor.contiguous().flatten().view(torch.uint8).cpu() for tensor in tensors]
    padded = [torch.nn.functional.pad(part, (0, -len(part) % 8)) for part in parts]
    pieces = len(memories[-1]._range._mapped) if memories else 0
    sums = [checksum(part) if len(part) else 0 for part in padded]
    said = {"kept": any("were kept" in line for line in told), "told": told, "taken": taken, "pieces": pieces}
    print(json.dumps(said | {"sums": sums, "bytes": sum(map(len, parts))}), flush=True)
    if END == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if END == "fault":
        # An access to nowhere: the context is lost.
        nowhere = torch.empty(1, device=GPU)
        index = torch.full((1 << 20,), 1 << 40, device=GPU)
        try:
            nowhere[index] = 1.0
            torch.cuda.synchronize()
        except RuntimeError:
            print("lost", flush=True)
            os._exit(3)
    if END == "write":
        try:
            model.embedding_YE.fill_(1.0)
            torch.cuda.synchronize()
        except RuntimeError:
            print("refused", flush=True)
            os._exit(3)


main()
