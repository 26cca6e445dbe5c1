"""Decode parsed PTX into instructions of the executor.

An instruction is looked up by its opcode without modifiers that change nothing here. An unknown
instruction raises an error with its text.
"""

import ctypes
import re
from typing import NamedTuple

from bench.gpu_model import library
from bench.gpu_model.ptx import (
    BITS,
    Kernel,
    Statement,
    UnsupportedError,
    branch_targets,
    reconvergence,
)

SLOT_BYTES = {1: 64, 16: 64, 32: 128, 64: 256}
# Modifiers that do not change the result here, or the instruction.
MODIFIERS = {"rn", "approx", "full", "sync", "aligned", "uni"}
SPECIAL = ["%laneid", "%tid.x", "%ntid.x"]  # filled in by the executor
SPECIAL += [f"%{name}.{axis}" for name in ("ctaid", "nctaid") for axis in "xyz"]
WARP, MAX_BARRIERS = 32, 16
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


class Slot(NamedTuple):
    """Where a value is filled in before a launch: an offset in a warp's registers."""

    offset: int
    bits: int


class Program:
    """A kernel decoded for the executor.

    Attributes:
        kernel: the decoded kernel; statement i is instruction i.
        code, operands: the executor's arrays.
        register_bytes: register bytes of a warp.
        constants: slots of immediate numbers, by value; ``parameters``: of arguments, by place.
        special: slots of ``SPECIAL``.
        operation_names: the executor's, by their numbers in ``code``.
        tracks_wgmma: it has asynchronous products.
        partitioned: it has mbarriers, or barriers of some warps.
        tables: the targets of all brx.idx.
    """

    def __init__(self, kernel: Kernel, executor: library.Library) -> None:
        self.kernel, self._executor = kernel, executor
        self.operation_names = list(executor.operations)
        self.register_bytes = 0
        self.constants: dict[tuple[int, int], Slot] = {}
        self.parameters: dict[tuple[int, int], Slot] = {}
        self._registers: dict[str, Slot] = {}
        self._operands: list[int] = []
        self.special = [self._register(name, 32) for name in SPECIAL]
        self.code = (library.Instruction * len(kernel.statements))()
        self.tracks_wgmma = self.partitioned = False
        tables: list[int] = []
        self._tables = tables
        for instruction, statement in zip(self.code, kernel.statements, strict=True):
            self._now = instruction
            self._decode(statement)
        for branch, target in reconvergence(kernel).items():
            self.code[branch].reconverge = target
        self.operands = (ctypes.c_int32 * len(self._operands))(*self._operands)
        self.tables = (ctypes.c_int32 * max(1, len(tables)))(*tables)

    # ---- operands ----

    def _allocate(self, bits: int) -> Slot:
        slot = Slot(self.register_bytes, bits)
        self.register_bytes += SLOT_BYTES[bits]
        return slot

    def _width(self, name: str) -> int:
        prefix = name.rstrip("0123456789")
        if name in SPECIAL:
            return 32
        if prefix not in self.kernel.registers:
            raise UnsupportedError(f"register {name}")
        return self.kernel.registers[prefix]

    def _register(self, name: str, bits: int) -> int:
        if name == "_":
            return -1
        if self._width(name) != bits:
            raise UnsupportedError(f"{name} has {self._width(name)} bits where {bits} are wanted")
        if name not in self._registers:
            self._registers[name] = self._allocate(bits)
        return self._registers[name].offset

    def _operand(self, text: str, bits: int) -> int:
        if text.startswith("%") or text == "_":
            return self._register(text, bits)
        if text[:2].lower() in ("0f", "0d"):
            return self._constant(int(text[2:], 16), bits)
        if text.startswith("global_smem"):  # all of a kernel's shared memory, at address 0
            return self._constant(int(text.partition("+")[2] or 0), bits)
        try:
            return self._constant(int(text.rstrip("U"), 0), bits)
        except ValueError:
            raise UnsupportedError(f"operand {text}") from None

    def _constant(self, value: int, bits: int) -> int:
        value = (-1 if value else 0) if bits == 1 else value
        key = bits, value & ((1 << max(bits, 32)) - 1)
        if key not in self.constants:
            self.constants[key] = self._allocate(bits)
        return self.constants[key].offset

    def _address(self, text: str, bits: int) -> tuple[int, int]:
        """Return the slot of the base and the offset of ``[base+offset]``."""
        base, _, offset = text.strip("[] ").partition("+")
        return self._operand(base.strip(), bits), int(offset or 0)

    # ---- instructions ----

    def _decode(self, s: Statement) -> None:
        self._now.guard = self._now.target = self._now.reconverge = -1
        if s.guard:
            self._now.guard = self._register(s.guard.lstrip("!"), 1)
            self._now.negated = s.guard.startswith("!")
        parts = s.opcode.split(".")
        try:
            decode = getattr(self, f"_decode_{parts[0]}", self._decode_lanes)
            decode(s, parts)
        except (UnsupportedError, KeyError, IndexError, ValueError) as error:
            raise UnsupportedError(f"{s.text} ({error})") from error

    def _set(self, name: str, *slots: int, results: int = 0, **rest: int) -> None:
        if name not in self._executor.operations:
            raise UnsupportedError(name)
        self._now.operation = self._executor.operations[name]
        self._now.first, self._now.count = len(self._operands), len(slots)
        self._now.results = results
        self._operands += slots
        for field, value in rest.items():
            setattr(self._now, field, value)

    def _decode_lanes(self, s: Statement, parts: list[str]) -> None:
        """Every instruction that the executor names as PTX does."""
        kept = [p for p in parts if p not in MODIFIERS and p != "ftz"]
        if parts[0] == "setp":
            kept[1] = UNSIGNED_NAMES.get(kept[1], kept[1])
        if parts[0] == "max" and len(s.operands) == 4:
            kept[0] += "3"
        kind = kept.pop()
        if "ftz" in parts:
            kept.append("ftz")
        bits = BITS.get(kind, 0)
        # The sign of integers often does not matter. Only moves treat all types of a number alike.
        untyped = (kind[0] in "bsu" and kind[:2] != "bf") or parts[0] in ("mov", "selp")
        for candidate in (kind, str(bits), f"u{bits}")[: 3 if untyped else 1]:
            name = ".".join([*kept, candidate])
            if name in self._executor.operations:
                break
        else:
            raise UnsupportedError(name)
        widths = self._executor.widths[name]
        if len(s.operands) != len(widths):
            raise UnsupportedError(f"{len(s.operands)} operands")
        slots = (self._operand(o, w) for o, w in zip(s.operands, widths, strict=True))
        self._set(name, *slots, results=1)

    def _decode_mov(self, s: Statement, parts: list[str]) -> None:
        to, source = s.operands
        bits = BITS[parts[-1]]
        if source in dict(self.kernel.parameters):  # its address: that of a tensor map
            return self._decode_parameter(s)
        if to.startswith("{"):
            narrow = _vector(to)
            width = bits // len(narrow)
            slots = [self._register(n, width) for n in narrow]
            name = f"unpack.{bits}.{width}"
            whole = self._operand(source, bits)
            return self._set(name, *slots, whole, results=len(narrow))
        if source.startswith("{"):
            narrow = _vector(source)
            width = bits // len(narrow)
            slots = [self._operand(n, width) for n in narrow]
            return self._set(f"pack.{bits}.{width}", self._register(to, bits), *slots, results=1)
        return self._decode_lanes(s, parts)

    def _decode_cvta(self, s: Statement, parts: list[str]) -> None:
        """An address is the same in every space."""
        if parts[1:] != ["param", "u64"]:
            raise UnsupportedError("an address of another space")
        self._set("mov.64", *(self._register(name, 64) for name in s.operands), results=1)

    def _decode_cvt(self, s: Statement, parts: list[str]) -> None:
        source = s.operands[1]
        # Of a register that is wider than its type, an instruction takes the low half.
        if parts == ["cvt", "s64", "s32"] and self._width(source) == 64:
            slots = (self._register(name, 64) for name in s.operands)
            self._set("cvt.s64.s32.low", *slots, results=1)
        else:
            self._decode_lanes(s, parts)

    def _decode_bra(self, s: Statement, parts: list[str]) -> None:
        self._set("bra", target=self.kernel.labels[s.operands[0]])

    def _decode_brx(self, s: Statement, parts: list[str]) -> None:
        if s.guard:
            raise UnsupportedError("a guard")
        targets = branch_targets(self.kernel, s)
        index = self._operand(s.operands[0], 32)
        self._set("brx", index, target=len(self._tables), vector=len(targets))
        self._tables += targets

    def _decode_ret(self, s: Statement, parts: list[str]) -> None:
        if s.guard:
            raise UnsupportedError("a guard")
        self._set("ret")

    def _decode_bar(self, s: Statement, parts: list[str]) -> None:
        if "warp" in parts:
            return self._set("nop")
        number, threads = (*map(int, s.operands), 0)[:2]
        arrives = set(parts[1:]) - {"cta", "sync", "aligned"}
        if arrives or s.guard or threads % WARP or not 0 <= number < MAX_BARRIERS:
            raise UnsupportedError("a barrier")
        if (number, threads) != (0, 0):
            self.partitioned = True
        return self._set("bar", size=number, vector=threads // WARP)

    _decode_barrier = _decode_bar

    def _decode_setmaxnreg(self, s: Statement, parts: list[str]) -> None:
        count = int(s.operands[0])
        if count % 8 or not 24 <= count <= 256:
            raise UnsupportedError(f"{count} registers, where 24 to 256 in steps of 8 can be set")
        self.partitioned = True
        self._set("setmaxnreg", size=count, variant=parts[1] == "inc")

    def _decode_elect(self, s: Statement, parts: list[str]) -> None:
        lane, predicate = s.operands[0].split("|")
        self._set("elect", self._register(lane, 32), self._register(predicate, 1), results=2)

    def _decode_fence(self, s: Statement, parts: list[str]) -> None:
        if parts[1] == "mbarrier_init":  # orders as a barrier does, but also for other programs
            return self._set("nop")
        if parts[1:3] != ["proxy", "async"]:
            raise UnsupportedError("a fence")
        return self._set("fence.proxy.async")

    def _decode_mbarrier(self, s: Statement, parts: list[str]) -> None:
        self.partitioned = True
        verb = parts[1]
        if verb in ("try_wait", "test_wait"):  # a warp that polls is taken to wait
            if "parity" not in parts:
                raise UnsupportedError("a wait for a state")
            predicate, address, parity = s.operands[:3]
            base, offset = self._address(address, 32)
            slots = self._register(predicate, 1), base, self._operand(parity, 32)
            return self._set("mbarrier.try_wait", *slots, results=1, offset=offset)
        if "expect_tx" in parts or verb == "arrive":
            arrives = verb == "arrive"
            state, *operands = s.operands if arrives else ("_", *s.operands)
            if state != "_" or "noComplete" in parts:
                raise UnsupportedError("the state of an mbarrier")
            expects = "expect_tx" in parts
            address, *number = operands
            base, offset = self._address(address, 32)
            count = "1" if expects or not number else number[0]
            slots = [base, self._operand(count, 32)]
            if expects:
                slots.append(self._operand(number[0], 32))
            return self._set(
                "mbarrier.arrive", *slots, offset=offset, variant=arrives | expects << 1
            )
        if verb not in ("init", "inval"):
            raise UnsupportedError(s.opcode)
        base, offset = self._address(s.operands[0], 32)
        counts = (self._operand(count, 32) for count in s.operands[1:])
        return self._set(f"mbarrier.{verb}", base, *counts, offset=offset)

    def _decode_parameter(self, s: Statement) -> None:
        to, source = s.operands
        names = [name for name, _ in self.kernel.parameters]
        key = names.index(source.strip("[] ").removesuffix("+0")), self._width(to)
        if key not in self.parameters:
            self.parameters[key] = self._allocate(key[1])
        name = f"mov.{key[1]}"
        slots = self._register(to, key[1]), self.parameters[key].offset
        self._set(name, *slots, results=1)

    def _decode_st(self, s: Statement, parts: list[str]) -> None:
        verb, *rest, kind = parts
        if rest == ["param"]:
            return self._decode_parameter(s)
        registers, address = s.operands if verb == "ld" else s.operands[::-1]
        space = "global" if "global" in rest else "shared"
        if unknown := set(rest) - {space, "v2", "v4"}:
            raise UnsupportedError(", ".join(unknown))
        names = _vector(registers)
        widths = {self._width(n) for n in names if n.startswith("%")}
        width = widths.pop() if widths else max(16, BITS[kind])
        base, offset = self._address(address, 64 if space == "global" else 32)
        return self._set(
            f"{verb}.{space}",
            *(self._operand(n, width) for n in names),
            base,
            results=len(names) if verb == "ld" else 0,
            size=BITS[kind] // 8,
            vector=len(names),
            width=width,
            offset=offset,
        )

    _decode_ld = _decode_st

    def _decode_bulk(self, s: Statement, parts: list[str]) -> None:
        self.partitioned = True
        if "commit_group" in parts:
            return self._set("bulk.commit_group")
        if "wait_group" in parts:
            pending = int(s.operands[0])
            return self._set("bulk.wait_group", size=pending, variant="read" not in parts)
        modes = {"cp", "reduce", "async", "bulk", "tensor", "shared", "global", "tile", "add"}
        modes |= {"bulk_group", "mbarrier::complete_tx::bytes", "1d", "2d", "3d", "4d", "5d"}
        if unknown := set(parts) - modes or {"tensor"} - set(parts):
            raise UnsupportedError(", ".join(sorted(unknown)))
        loads = parts.index("shared") < parts.index("global")
        shared, tensor = s.operands[:2] if loads else s.operands[1::-1]
        to, offset = self._address(shared, 32)
        tensor_map, _, coordinates = tensor.strip("[] ").partition(",")
        starts = _vector(coordinates.strip())
        slots = [to, self._operand(tensor_map.strip(), 64)]
        slots += [self._operand(start, 32) for start in starts]
        name = "bulk.reduce" if "reduce" in parts else "bulk.store"
        barrier_offset = 0
        if loads:
            name = "bulk.load"
            barrier, barrier_offset = self._address(s.operands[2], 32)
            slots.append(barrier)
        more = {"vector": len(starts), "offset": offset, "variant": barrier_offset}
        return self._set(name, *slots, **more)

    def _decode_cp(self, s: Statement, parts: list[str]) -> None:
        if "bulk" in parts:
            return self._decode_bulk(s, parts)
        if parts[2] == "commit_group":
            return self._set(s.opcode)
        if parts[2] == "wait_group":
            return self._set(s.opcode, variant=int(s.operands[0]))
        if parts[2] not in ("ca", "cg"):
            raise UnsupportedError(s.opcode)
        to, to_offset = self._address(s.operands[0], 32)
        source, source_offset = self._address(s.operands[1], 64)
        reads = [self._operand(s.operands[3], 32)] if len(s.operands) > 3 else []
        size = int(s.operands[2], 0)
        return self._set(
            "cp.async",
            *(to, source, *reads),
            size=size,
            offset=to_offset,
            variant=source_offset,
        )

    def _decode_stmatrix(self, s: Statement, parts: list[str]) -> None:
        if "m8n8" not in parts or parts[-1] != "b16":
            raise UnsupportedError(s.opcode)
        loads = parts[0] == "ldmatrix"
        registers, address = s.operands if loads else s.operands[::-1]
        slots = [self._operand(n, 32) for n in _vector(registers)]
        base, offset = self._address(address, 32)
        self._set(
            parts[0],
            *slots,
            base,
            results=len(slots) if loads else 0,
            vector=len(slots),
            offset=offset,
            variant="trans" in parts,
        )

    _decode_ldmatrix = _decode_stmatrix

    def _decode_mma(self, s: Statement, parts: list[str]) -> None:
        shape = next(p for p in parts if p.startswith("m16"))
        result, a, b, addend = parts[-4:]
        if (result, addend) != ("f32", "f32") or a != b:
            raise UnsupportedError("formats")
        slots = [self._operand(n, 32) for o in s.operands for n in _vector(o)]
        self._set(f"mma.{shape}.{a}", *slots, results=4)

    def _decode_wgmma(self, s: Statement, parts: list[str]) -> None:
        self.tracks_wgmma = True
        if parts[1] != "mma_async":
            count = int(s.operands[0]) if s.operands else 0
            return self._set(".".join(parts[:2]), variant=count)
        shape, result, a_format, b_format = parts[-4:]
        sizes = re.fullmatch(r"m64n(\d+)(k\d+)", shape)
        results, a, b, keeps, *factors = s.operands
        if sizes is None or result != "f32" or a_format != b_format or factors[:2] != ["1", "1"]:
            raise UnsupportedError("formats or factors")
        in_registers = a.startswith("{")
        transposed = [int(t) for t in factors[2:]]
        if in_registers:
            transposed.insert(0, 0)
        transposed += [0] * (2 - len(transposed))
        width = 32 if in_registers else 64
        return self._set(
            f"wgmma.{sizes[2]}.{a_format}",
            *(self._register(n, 32) for n in _vector(results)),
            self._operand(keeps, 1),
            *(self._operand(n, width) for n in _vector(a)),
            self._operand(b, 64),
            results=int(sizes[1]) // 2,
            vector=int(sizes[1]),
            variant=in_registers | transposed[0] << 1 | transposed[1] << 2,
        )

    def _decode_shfl(self, s: Statement, parts: list[str]) -> None:
        *operands, lanes, _ = s.operands
        if lanes != "31":
            raise UnsupportedError("lanes in groups")
        self._decode_lanes(s._replace(operands=tuple(operands)), parts)

    def _decode_redux(self, s: Statement, parts: list[str]) -> None:
        self._decode_lanes(s._replace(operands=s.operands[:2]), parts)


def _vector(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{} ").split(",")]
