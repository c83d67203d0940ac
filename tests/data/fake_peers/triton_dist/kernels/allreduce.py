from __future__ import annotations

from enum import IntEnum


class AllReduceMethod(IntEnum):
    OneShot = 1
    TwoShot = 2
    OneShot_Multimem = 5
