"""What a failed export means for the person whose model it is."""

from __future__ import annotations

import linecache
import os
import re
import traceback

import torch
from torch import nn

from passes.errors import PassError

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__)
_CAUSES = (
    (
        re.compile(r"data.dependent|GuardOnDataDependent|_local_scalar_dense|Eq\(u\d"),
        "data-dependent control flow can not be traced",
        "Write the branch with torch.where or torch.cond, or pass the value in as a "
        "Python number",
    ),
    (
        re.compile(r"cannot be called on meta tensors|\.item\(\)|\.tolist\(\)"),
        "the forward reads a tensor's value",
        "Pass the value in as a Python number or keep it in a tensor",
    ),
    (
        re.compile(r"not a known type|is not registered|pytree"),
        "an input or output is of a type that can not be traced",
        "Return tensors, tuples or dicts (switch caches off), or register the class "
        "with torch.utils._pytree",
    ),
    (
        re.compile(
            r"NotImplementedError|no fake impl|not implemented for|DynamicOutput"
        ),
        "an op has no shape rule on meta tensors",
        "Register a fake implementation with torch.library.register_fake",
    ),
)
_OP = re.compile(r"\b((?:aten|prims|torchvision|[a-z_]\w+::)[.:]*\w+(?:\.\w+)?)")


def explain(error: BaseException, model: nn.Module) -> PassError:
    """A :class:`PassError` that names the cause, the op and the user's line."""
    text = f"{type(error).__name__}: {error}"
    what, fix = "the model can not be traced", "Check that its forward runs"
    for pattern, cause, advice in _CAUSES:
        if pattern.search(text):
            what, fix = cause, advice
            break
    op = re.search(r"\b(?:aten|torchvision|prims)(?:\.|::)\w+(?:\.\w+)?", text)
    where = user_line(error) or type(model).__name__
    named = f" (op {op.group(0)})" if op else ""
    reason = "" if fix != "Check that its forward runs" else f" [{_first_line(text)}]"
    return PassError(what + named, where + reason, fix)


def _first_line(text: str) -> str:
    line = next((x.strip() for x in text.splitlines() if x.strip()), text)
    return line if len(line) < 200 else line[:197] + "..."


def user_line(error: BaseException) -> str:
    """``file.py:12 in forward: x = y`` of the innermost frame outside torch."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        inside = (_TORCH, _HERE, "<")
        if frame.filename.startswith(inside) or frame.name == "<lambda>":
            continue
        code = linecache.getline(frame.filename, frame.lineno or 0).strip()
        if frame.name in ("trace", "explain"):
            continue
        found = f"{frame.filename}:{frame.lineno} in {frame.name}: {code}"
    if "User code" in str(error) or "user code" in str(error):
        lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error))
        own = [x for x in lines if not x[0].startswith(_TORCH)]
        if own:
            path, line, name = own[-1]
            code = linecache.getline(path, int(line)).strip()
            found = f"{path}:{line} in {name}: {code}"
    return found
