"""Whole tensors out of a checkpoint's files, with arithmetic of its own.

Reads the manifest as plain JSON and the files with safetensors; knows nothing of shards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.logical import Whole


def manifest_body(folder: Path) -> dict[str, Any]:
    """What the manifest says, unchecked."""
    body: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["body"]
    return body


def whole_planes(folder: Path) -> dict[str, Whole]:
    """Plane -> tensor name -> the whole tensor; every line of it must be stored just once."""
    body = manifest_body(folder)
    files = [load_file(folder / name) for name, *_ in body["files"]]
    planes: dict[str, Whole] = {}
    for plane in body["planes"]:
        whole: Whole = {}
        for t, stored in zip(body["model"]["tensors"], plane["tensors"], strict=True):
            lines: list[int] = []
            parts = []
            for first, stop, stride, file in stored["runs"]:
                parts.append(files[file][f"{plane['name']}|{t['name']}|{first}:{stop}:{stride}"])
                lines += _lines(t, body["model"]["counts"], range(first, stop, stride))
            assert sorted(lines) == list(range(t["shape"][t["dim"]])), t["name"]
            order = torch.tensor(lines).argsort()
            whole[t["name"]] = torch.cat(parts, dim=t["dim"]).index_select(t["dim"], order)
        planes[plane["name"]] = whole
    return planes


def _lines(t: dict[str, Any], counts: dict[str, int], blocks: range) -> list[int]:
    """Logical index along the cut dim of each stored line, part after part."""
    size = t["shape"][t["dim"]] // t["parts"]
    number = 1 if t["kind"] is None else counts[t["kind"]] // t["sharing"]
    step = -(-size // number)
    return [
        part * size + i
        for part in range(t["parts"])
        for b in blocks
        for i in range(b * step, min((b + 1) * step, size))
    ]
