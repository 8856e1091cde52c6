"""The CUDA backend: batches of residues in the memory of one or several GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from he_processors.bignum import reference
from he_processors.bignum.interface import ModBatch, Residues, byte_width, random_rows_below, rows_from_ints, widen
from he_processors.cuda.arithmetic import DeviceArithmetic, power_program, segment_slabs, table_window
from he_processors.cuda.device import Array, Device, ShapePair, guarded, open_devices, shapes_for
from he_processors.errors import BackendUnavailable, ProtocolError
from he_processors.randomness import OS_RANDOMNESS, RandomSource, random_below

# Whether a device computes what the CPU computes, over the whole width of the numbers it is to work on.
#
# A wrong product would give wrong sums without any error, and a wrong power a key's secret factor away (a fault in half
# of a decryption by the Chinese remainder theorem does). So nothing is done on a device before it has agreed.


_N_RANDOM = 5
_EXPONENT_BITS = 72  # more than two words
_GROUP, _SHIFT_BITS = 3, 70
_STARTS = np.array([0, 0, 1, 3, 9], dtype=np.int64)  # no row, one, two, several

_Operation = Callable[[ModBatch, Residues], Residues]


def random_modulus(bits: int, source: RandomSource = OS_RANDOMNESS) -> int:
    """Return a random odd number of exactly ``bits`` bits."""
    return 1 << (bits - 1) | random_below(1 << (bits - 1), source) | 1


def first_disagreement(batch: ModBatch, source: RandomSource = OS_RANDOMNESS) -> str | None:
    """Return the first operation whose result differs from the CPU's, or None.

    Operands: 0, 1, the two largest residues, and random ones.
    """
    trusted: ModBatch = reference.ReferenceBatch(batch.modulus)  # type: ignore[assignment]  # its residues are plain lists
    edges = rows_from_ints([0, 1, batch.modulus - 1, batch.modulus - 2], batch.width)
    rows = np.concatenate([edges, random_rows_below(_N_RANDOM, batch.modulus, source)])
    for name, operation in _operations(len(rows), batch.modulus, source):
        ours, theirs = (b.to_wire(operation(b, b.from_wire(rows))) for b in (batch, trusted))
        if not np.array_equal(ours, theirs):
            return name
    return None


def _operations(n_rows: int, modulus: int, source: RandomSource) -> Iterator[tuple[str, _Operation]]:
    order = np.arange(n_rows, dtype=np.int64)[::-1].copy()
    exponent = random_modulus(_EXPONENT_BITS, source)
    exponents = random_rows_below(n_rows, 1 << _EXPONENT_BITS, source)
    base = random_below(modulus, source)
    yield "entering and leaving", lambda batch, rows: rows
    yield "products", lambda batch, rows: batch.mul(rows, batch.take(rows, order))
    yield "squares", lambda batch, rows: batch.mul(rows, rows)
    yield "segprod", lambda batch, rows: batch.segprod(rows, order.astype(np.int32), _STARTS)
    yield "powers", lambda batch, rows: batch.pow_const(rows, exponent)
    yield "powers of one base", lambda batch, rows: batch.fixed_base(base, _EXPONENT_BITS).pow(exponents)
    yield "horner", lambda batch, rows: batch.horner(rows, _GROUP, _SHIFT_BITS)


# Powers of one base on the CUDA backend, by table.


class CudaFixedBase:
    """A table of powers of one base, made when the first exponents come, on each device that takes part.

    The window suits the number of exponents seen so far, and keeps the table within the device's cache.
    """

    def __init__(self, arithmetic: CudaBatch, base: int, exponent_bits: int) -> None:
        if exponent_bits < 1:
            raise ValueError("exponent_bits must be at least 1")
        self.device_errors = arithmetic.device_errors
        self._arithmetic = arithmetic
        self._base = base % arithmetic.modulus
        self._exponent_bits = exponent_bits
        self._seen = 0
        self._made: tuple[int, dict[int, Array]] = 0, {}  # window, and tables by device number; replaced together

    @guarded
    def pow(self, exponents: NDArray[np.uint8]) -> CudaResidues:
        """Raise the base to each exponent.

        Shapes: exponents: uint8[n, ceil(exponent_bits / 8)], little-endian; result: Residues[n].

        Raises:
            ValueError: an exponent needs more than ``exponent_bits`` bits.
        """
        reference.check_exponents(exponents, self._exponent_bits)
        window, tables = self._tables_for(len(exponents))
        n_words, n_windows = -(-exponents.shape[1] // 4), -(-self._exponent_bits // window)

        def power(start: int, stop: int, number: int) -> Array:
            unit = self._arithmetic.on_device[number]
            if number not in tables:
                tables[number] = unit.power_table(self._base, window, n_windows)
            words = np.ascontiguousarray(widen(exponents[start:stop], 4 * n_words)).view("<u4")
            return unit.table_powers(tables[number], window, n_windows, words)

        return self._arithmetic.build(len(exponents), power)

    def _tables_for(self, n_exponents: int) -> tuple[int, dict[int, Array]]:
        room = min(device.table_bytes for device in self._arithmetic.devices)
        # No lock, as in native.py: threads at worst make a table twice.
        self._seen += n_exponents
        made = self._made
        window = table_window(self._exponent_bits, self._seen, self._arithmetic.row_bytes, room)
        if made[0] == 0 or window > made[0] + 1:
            made = self._made = window, {}
        return made


# The CUDA backend: batches of residues in the memory of one or several GPUs.
#
# A batch is cut into blocks of rows, dealt out to the devices; a block that does not fit beside what is there waits in
# host memory and is copied in when an operation needs it. Besides the interface, ``CudaBatch`` offers ``scale``,
# ``add`` and ``lift`` (see ``interface.py``) and ``from_wide``.
#
# Security: nothing here runs in constant time. Exponents are erased from device memory after use; whoever shares the
# device with the key owner could otherwise learn about them, and is outside the threat model (SECURITY.md).


_MIN_ROWS_TO_SPREAD = 1 << 14  # fewer rows than this stay on one device
_KEEP_FREE_BLOCKS = 4  # room for operands, result and scratch of the next operation
_MAX_POSITIONS = 1 << 28  # of a row order in device memory at a time


def load() -> Callable[[int], CudaBatch]:
    """Return the factory ``CudaBatch(modulus)`` over every GPU of this machine.

    The factory raises BackendUnavailable if a device does not compute numbers of that length as the CPU does.

    Raises:
        BackendUnavailable: CuPy, a driver, a device or the run-time compiler is missing or fails.
    """
    devices = _checked_devices()

    def open_batch(modulus: int) -> CudaBatch:
        batch = CudaBatch(modulus, devices=devices)
        _check_length(devices, modulus.bit_length())
        return batch

    return open_batch


@cache
def _check_length(devices: tuple[Device, ...], bits: int) -> None:
    """Compare every kernel, in both shapes, with the CPU on each device, for a modulus of this length.

    Raises:
        BackendUnavailable: naming the operation that differs.
    """
    pair = shapes_for(bits)
    if pair is None:
        raise ValueError(f"the kernels hold no modulus of {bits} bits")
    for number, device in enumerate(devices):
        for shape in {pair.narrow, pair.wide}:
            batch = CudaBatch(random_modulus(bits), devices=(device,), shapes=ShapePair(shape, shape))
            wrong = first_disagreement(batch)
            if wrong is not None:
                raise BackendUnavailable(f"CUDA device {number} computes wrong {wrong} of {bits} bits")


@cache
def _checked_devices() -> tuple[Device, ...]:
    """Open every device, compile the smallest kernels and check one product on each."""
    devices = open_devices()
    for device in devices:
        probe = CudaBatch((1 << 61) - 1, devices=(device,))
        minus_two = probe.from_wide(rows_from_ints([probe.modulus - 2], probe.width))
        if probe.to_wire(probe.mul(minus_two, minus_two)).tobytes() != (4).to_bytes(probe.width, "little"):
            raise BackendUnavailable("a CUDA device computes wrong products")
    return devices


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Block:
    """Consecutive rows of a batch, in Montgomery form. Never written again.

    Shapes: rows: uint32[n, limbs], in the memory of device number ``device``, or of the host if that is None.
    """

    start: int
    rows: Array
    device: int | None

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CudaResidues:
    """A batch as blocks in row order, and the modulus it belongs to.

    Security: a modulus may be secret (the square of a prime), as may the residues; neither is shown by ``repr``.
    """

    blocks: tuple[Block, ...]
    modulus: int

    def __len__(self) -> int:
        return self.blocks[-1].stop if self.blocks else 0

    def __repr__(self) -> str:
        return f"CudaResidues({len(self)} rows)"


class CudaBatch:
    """Batch arithmetic modulo one odd modulus of at most 8192 bits.

    Args:
        modulus: the modulus; it is padded up to the next size that the kernels know.
        devices: the devices to use.
        shapes: how the kernels spread numbers, if not as suits the modulus.

    Raises:
        ValueError: the modulus is even or too small.
        BackendUnavailable: it is too long or a device fails.
    """

    name = "cuda"

    def __init__(self, modulus: int, *, devices: tuple[Device, ...], shapes: ShapePair | None = None) -> None:
        reference.check_modulus(modulus)
        shapes = shapes or shapes_for(modulus.bit_length())
        if shapes is None:
            raise BackendUnavailable(f"CUDA kernels do not take a modulus of {modulus.bit_length()} bits")
        self.modulus = modulus
        self.width = byte_width(modulus)
        self.devices = devices
        self.device_errors = tuple({error for device in devices for error in device.errors})
        self.row_bytes = shapes.narrow.row_bytes
        try:
            self.on_device = tuple(DeviceArithmetic(device, modulus, shapes) for device in devices)
        except self.device_errors as error:
            raise BackendUnavailable(f"CUDA failed at the start: {type(error).__name__}") from error

    @guarded
    def from_wire(self, rows: NDArray[np.uint8]) -> CudaResidues:
        """Take residues in. Shapes: rows: uint8[n, width]. Raises: ProtocolError if a value >= modulus."""
        reference.check_rows(rows, self.width)
        flags = [device.upload(np.zeros(1, dtype=np.uint32)) for device in self.devices]

        def enter(start: int, stop: int, number: int) -> Array:
            unit = self.on_device[number]
            return unit.enter(unit.upload(rows[start:stop]), flags[number])

        residues = self.build(len(rows), enter)
        if any(device.download(flag)[0] for device, flag in zip(self.devices, flags, strict=True)):
            raise ProtocolError("a residue is not below its modulus")
        return residues

    @guarded
    def from_wide(self, rows: NDArray[np.uint8]) -> CudaResidues:
        """Take integers of any width in, reduced by the modulus.

        Shapes: rows: uint8[n, any width], little-endian; result: Residues[n].
        """
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] < 1:
            raise ValueError("rows must be uint8[n, width]")
        offsets = range(0, rows.shape[1], self.row_bytes)

        def enter(start: int, stop: int, number: int) -> Array:
            unit = self.on_device[number]
            pieces = [rows[start:stop, offset : offset + self.row_bytes] for offset in offsets]
            total = unit.enter(unit.upload(pieces.pop()))
            while pieces:
                total = unit.add(unit.shift(total), unit.enter(unit.upload(pieces.pop())))
            return total

        return self.build(len(rows), enter)

    @guarded
    def to_wire(self, residues: CudaResidues) -> NDArray[np.uint8]:
        """Give residues out in canonical form. Shapes: result: uint8[n, width]."""
        self._check_own(residues)
        out = np.empty((len(residues), self.width), dtype=np.uint8)
        for start, stop, number in self._cuts(len(residues)):
            device = self.devices[number]
            with device.active():
                raw = self.on_device[number].leave(self._rows(residues, start, stop, number))
                out[start:stop] = device.download(device.xp.ascontiguousarray(raw.view(np.uint8)[:, : self.width]))
        return out

    @guarded
    def lift(self, source: CudaBatch, residues: CudaResidues) -> CudaResidues:
        """Take canonical residues of a modulus of no more bits as residues of this one; they stay on the devices.

        Shapes: residues: Residues[n] of ``source``; result: Residues[n].
        """
        source._check_own(residues)
        if source.devices is not self.devices or source.modulus.bit_length() > self.modulus.bit_length():
            raise ValueError("residues are lifted from a modulus of no more bits, on the same devices")

        def enter(start: int, stop: int, number: int) -> Array:
            raw = source.on_device[number].leave(source._rows(residues, start, stop, number))
            unit = self.on_device[number]
            wide = self.devices[number].xp.zeros((len(raw), unit.shapes.limbs), dtype=np.uint32)
            wide[:, : raw.shape[1]] = raw
            return unit.enter(wide)

        return self.build(len(residues), enter)

    @guarded
    def take(self, residues: CudaResidues, index: NDArray[np.int64]) -> CudaResidues:
        """Gather rows. Shapes: index: int64[m]; result: Residues[m]. Raises: IndexError out of range."""
        self._check_own(residues)
        reference.check_index(index, len(residues))
        return self.build(len(index), lambda start, stop, number: self._gather(residues, index[start:stop], number))

    @guarded
    def concat(self, parts: list[CudaResidues]) -> CudaResidues:
        """Join batches in order."""
        blocks: list[Block] = []
        for part in parts:
            self._check_own(part)
            offset = blocks[-1].stop if blocks else 0
            blocks += [Block(offset + block.start, block.rows, block.device) for block in part.blocks]
        joined = CudaResidues(tuple(blocks), self.modulus)
        if len(blocks) <= 1:
            return joined
        return self.build(len(joined), lambda start, stop, number: self._rows(joined, start, stop, number))

    @guarded
    def mul(self, a: CudaResidues, b: CudaResidues) -> CudaResidues:
        """Multiply element by element; ``a`` and ``b`` may be the same object. Raises: ValueError on lengths."""
        if len(a) != len(b):
            raise ValueError("batches of different length cannot be multiplied")
        return self._combine(DeviceArithmetic.multiply, a, b)

    @guarded
    def scale(self, residues: CudaResidues, factor: CudaResidues) -> CudaResidues:
        """Multiply every row by one row. Shapes: factor: Residues[1]; result: Residues[n]."""
        if len(factor) != 1:
            raise ValueError("the factor must be a single residue")
        return self._combine(DeviceArithmetic.multiply, residues, factor)

    @guarded
    def add(self, a: CudaResidues, b: CudaResidues) -> CudaResidues:
        """Add element by element. Shapes: a, b: Residues[n]; or b: Residues[1], added to every row."""
        if len(b) not in (1, len(a)):
            raise ValueError("batches of different length cannot be added")
        return self._combine(DeviceArithmetic.add, a, b)

    @guarded
    def segprod(self, residues: CudaResidues, order: NDArray[np.int32], starts: NDArray[np.int64]) -> CudaResidues:
        """Multiply the rows of each segment of a row order; an empty segment gives 1.

        Each device multiplies the rows of its own blocks; the products of several blocks are then multiplied. Long
        segments are cut into chunks there, so callers need not cut them.

        Shapes: order: int32[m]; starts: int64[n_segments + 1], non-decreasing; result: Residues[n_segments].
        """
        self._check_own(residues)
        reference.check_segments(order, starts, len(residues))
        order, starts = np.ascontiguousarray(order, dtype=np.int32), np.asarray(starts, dtype=np.int64)
        slabs = []
        for first, last in segment_slabs(starts, _MAX_POSITIONS):
            begin, end = int(starts[first]), int(starts[last])
            slabs.append(self._products(residues, order[begin:end], starts[first : last + 1] - begin))
        return self.concat(slabs)

    def fixed_base(self, base: int, exponent_bits: int) -> CudaFixedBase:
        """Prepare powers of one base for exponents of at most ``exponent_bits`` bits."""
        return CudaFixedBase(self, base, exponent_bits)

    @guarded
    def pow_const(self, residues: CudaResidues, exponent: int) -> CudaResidues:
        """Raise every row to the same non-negative exponent. Raises: ValueError if it is negative."""
        self._check_own(residues)
        if exponent < 0:
            raise ValueError("exponent must not be negative")
        if exponent == 0:
            return self.build(len(residues), lambda start, stop, number: self.on_device[number].ones(stop - start))
        program = power_program(exponent)

        def power(start: int, stop: int, number: int) -> Array:
            rows = self._rows(residues, start, stop, number)
            return self.on_device[number].power(rows, program, self.devices[number].block_bytes)

        return self.build(len(residues), power)

    @guarded
    def horner(self, residues: CudaResidues, group: int, shift_bits: int) -> CudaResidues:
        """Pack: for each group of consecutive rows c_0, c_1, ... return prod_j c_j^(2^(shift_bits * j)).

        Shapes: residues: Residues[n], the last group may be shorter; result: Residues[ceil(n / group)].
        """
        self._check_own(residues)
        reference.check_horner(group, shift_bits)

        def pack(start: int, stop: int, number: int) -> Array:
            rows = self._rows(residues, start * group, min(stop * group, len(residues)), number)
            return self.on_device[number].horner(rows, group, shift_bits)

        return self.build(-(-len(residues) // group), pack)

    def build(self, n_rows: int, make: Callable[[int, int, int], Array]) -> CudaResidues:
        """Make a batch block by block: ``make(start, stop, device number)`` returns the rows of one block."""
        blocks = []
        for start, stop, number in self._cuts(n_rows):
            with self.devices[number].active():
                blocks.append(self._keep(start, make(start, stop, number), number))
        return CudaResidues(tuple(blocks), self.modulus)

    def _cuts(self, n_rows: int) -> list[tuple[int, int, int]]:
        """Cut rows into blocks (start, stop, device number): one to a device, or more where memory is short."""
        n_shares = len(self.devices) if n_rows >= _MIN_ROWS_TO_SPREAD else 1
        cuts = []
        for number in range(n_shares):
            begin, end = n_rows * number // n_shares, n_rows * (number + 1) // n_shares
            rows_at_once = max(1, self.devices[number].block_bytes // self.row_bytes)
            cuts += [(start, min(end, start + rows_at_once), number) for start in range(begin, end, rows_at_once)]
        return cuts

    def _keep(self, start: int, rows: Array, number: int) -> Block:
        device = self.devices[number]
        if device.free_bytes() < _KEEP_FREE_BLOCKS * device.block_bytes:
            return Block(start, device.download(rows), None)
        return Block(start, rows, number)

    def _check_own(self, residues: CudaResidues) -> None:
        if residues.modulus != self.modulus:
            raise ValueError("these residues belong to another modulus")

    def _rows(self, residues: CudaResidues, start: int, stop: int, number: int) -> Array:
        """Return rows [start, stop) in the memory of one device."""
        pieces = []
        for block in residues.blocks:
            begin, end = max(start, block.start), min(stop, block.stop)
            if begin < end:
                pieces.append(self._bring(block.rows[begin - block.start : end - block.start], block.device, number))
        return pieces[0] if len(pieces) == 1 else self.devices[number].xp.concatenate(pieces)

    def _bring(self, rows: Array, holder: int | None, number: int) -> Array:
        if holder == number:
            return rows
        return self.devices[number].upload(rows if holder is None else self.devices[holder].download(rows))

    def _gather(self, residues: CudaResidues, index: NDArray[np.int64], number: int) -> Array:
        upload = self.devices[number].upload
        out = self.on_device[number].empty(len(index))
        for block in residues.blocks:
            places = np.flatnonzero((index >= block.start) & (index < block.stop))
            wanted = index[places] - block.start
            if block.device is None:
                rows = block.rows[wanted]
            else:
                with self.devices[block.device].active():
                    rows = block.rows[self.devices[block.device].upload(wanted)]
            out[upload(places)] = self._bring(rows, block.device, number)
        return out

    def _combine(
        self, operation: Callable[[DeviceArithmetic, Array, Array], Array], a: CudaResidues, b: CudaResidues
    ) -> CudaResidues:
        """Run an operation on each row of ``a`` and the same row of ``b``, or its only row."""
        self._check_own(a)
        self._check_own(b)

        def block(start: int, stop: int, number: int) -> Array:
            other = (0, 1) if len(b) == 1 else (start, stop)
            return operation(self.on_device[number], self._rows(a, start, stop, number), self._rows(b, *other, number))

        return self.build(len(a), block)

    def _products(self, residues: CudaResidues, order: NDArray[np.int32], starts: NDArray[np.int64]) -> CudaResidues:
        n_segments = len(starts) - 1
        if not residues.blocks:
            return self.build(n_segments, lambda start, stop, number: self.on_device[number].ones(stop - start))
        partial_products = []
        for ordinal, block in enumerate(residues.blocks):
            number = ordinal % len(self.devices) if block.device is None else block.device
            device = self.devices[number]
            with device.active():
                rows = self._bring(block.rows, block.device, number)
                own_order, own_starts = device.upload(order), starts
                if len(residues.blocks) > 1:
                    own_order, own_starts = _positions_within(device, own_order, starts, block)
                products = self.on_device[number].segment_products(rows, own_order, own_starts)
                partial_products.append(CudaResidues((self._keep(0, products, number),), self.modulus))
        total = partial_products.pop()
        while partial_products:
            total = self.mul(total, partial_products.pop())
        return total


def _positions_within(
    device: Device, order: Array, starts: NDArray[np.int64], block: Block
) -> tuple[Array, NDArray[np.int64]]:
    """Keep the positions of a row order whose rows lie in one block, counted from the block's first row."""
    is_inside = (order >= block.start) & (order < block.stop)
    counts = device.xp.zeros(len(order) + 1, dtype=np.int64)
    counts[1:] = device.xp.cumsum(is_inside)
    return order[is_inside] - np.int32(block.start), device.download(counts[device.upload(starts)])
