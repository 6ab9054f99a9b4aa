"""Regions of POSIX shared memory that clients on this machine register for their tensors, Triton's extension.

Regions are read and written through a file descriptor and never mapped: a client that shrinks the object gets an error,
instead of ending the server by SIGBUS, and cannot change bytes after they were checked.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary, finalize

import msgspec

from dragoman.core.datatypes import Buffer
from dragoman.core.errors import AlreadyLoaded, InvalidInput, ModelNotFound, NotSupported
from dragoman.core.options import suggestion

REGION = "shared_memory_region"
SIZE = "shared_memory_byte_size"
_PREFIX = "shared_memory_"
_PARAMETERS = REGION, SIZE, "shared_memory_offset"
DISABLED = "Client shared memory is disabled. Start the server with '--shared-memory' to enable."
_FOLDER = "/dev/shm"  # noqa: S108 - POSIX shared memory on Linux
_KEY = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
_RESERVED = "triton_python_backend_shm_region_"
_MAX_REGIONS = 64
_MAX_OFFSET = 1 << 62


class Region(msgspec.Struct, frozen=True, weakref=True):
    """A registered region: `byte_size` bytes from `offset` of the object with this key.

    Its descriptor is closed once nothing refers to the region.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int


class RegionSlice(msgspec.Struct, frozen=True):
    """Where a tensor is: `byte_size` bytes from `offset` of the region with this name."""

    region: str
    byte_size: int
    offset: int = 0


def pop_slice(parameters: dict[str, Any], where: str) -> RegionSlice | None:
    """Remove the parameters of shared memory from those of a tensor and return them; None without a region.

    Raises InvalidInput naming the parameter.
    """
    if REGION not in parameters:
        return None
    name, size, offset = (parameters.pop(key, 0) for key in _PARAMETERS)
    for key in parameters:
        if key.startswith(_PREFIX):  # misspelt, another part of the region would be used
            raise InvalidInput(f"{where}: unknown parameter '{key[:64]}'{suggestion(key, _PARAMETERS)}")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where}: parameter '{REGION}' expects the name of a region, got {name!r}")
    for key, value in (("byte_size", size), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidInput(f"{where}: parameter 'shared_memory_{key}' expects a number of bytes, got {value!r}")
    if offset > _MAX_OFFSET:
        raise InvalidInput(f"{where}: Invalid offset for shared memory region: '{name}'")
    if size > _MAX_OFFSET:
        raise InvalidInput(
            f"{where}: Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds maximum value "
            f"{_MAX_OFFSET}"
        )
    return RegionSlice(name, size, offset)


class SharedRegions:
    """The registered regions of one owner by name. A request may read up to `max_bytes` from them.

    A region that is unregistered stays while a request holds it, as in Triton. Later requests do not find it: when the
    last one that holds it has ended is a matter of chance.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._regions: dict[str, Region] = {}
        self._unregistered: WeakValueDictionary[str, Region] = WeakValueDictionary()  # those that requests hold
        self._owners: dict[str, SharedRegions] = {}  # those of other owners

    def of(self, owner: str, *, registers: bool = False) -> "SharedRegions":
        """Return the regions of another owner, "" for these. An owner `registers` some, or none are remembered."""
        if not owner:
            return self
        regions = self._owners.get(owner) or SharedRegions(self._max_bytes)
        if registers:
            self._owners[owner] = regions
        return regions

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region. Raises InvalidInput or AlreadyLoaded."""
        plain = key.lstrip("/")
        if not plain:
            raise InvalidInput(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        if plain.startswith(_RESERVED):
            raise InvalidInput(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED}'"
            )
        if _KEY.fullmatch(plain) is None or plain in (".", ".."):
            raise InvalidInput(f"cannot register shared memory region '{name}' - invalid shm key '{key[:256]}'")
        if name in self._regions:
            raise AlreadyLoaded(f"shared memory region '{name}' already in manager")
        if len(self._regions) + len(self._unregistered) >= _MAX_REGIONS:
            raise InvalidInput(f"shared memory region '{name}': expected at most {_MAX_REGIONS} regions")
        descriptor = _open(plain, key)
        if byte_size < 1 or offset < 0 or offset + byte_size > os.fstat(descriptor).st_size:
            os.close(descriptor)
            raise InvalidInput(f"failed to register shared memory region '{name}': invalid args")
        region = self._regions[name] = Region(name, key, offset, byte_size, descriptor)
        finalize(region, os.close, descriptor)

    def unregister(self, name: str = "") -> None:
        """Close a region, or all, once no request holds it; an unknown name is none."""
        for each in [name] if name else list(self._regions):
            if each in self._regions:
                self._unregistered[each] = self._regions.pop(each)

    def status(self, name: str = "") -> Sequence[Region]:
        """Return the region with this name, or all. Raises ModelNotFound for an unknown name."""
        if not name:
            return list({**self._unregistered, **self._regions}.values())
        if (region := self._regions.get(name) or self._unregistered.get(name)) is None:
            raise ModelNotFound(f"Unable to find system shared memory region: '{name}'")
        return [region]

    def hold(self, names: Iterable[object]) -> tuple[Region, ...]:
        """Return the regions with these names, for a request to refer to until it has its response."""
        found = (self._regions.get(name) for name in names if isinstance(name, str))
        return tuple(region for region in found if region is not None)

    def check_total(self, sizes: Sequence[object]) -> None:
        """Raise InvalidInput if the inputs of a request are more than `max_bytes` together."""
        total = sum(size for size in sizes if isinstance(size, int))
        if total > self._max_bytes:
            raise InvalidInput(f"inputs in shared memory: expected at most {self._max_bytes} bytes, got {total}")

    def read(self, region_slice: RegionSlice, where: str) -> Buffer:
        """Return a copy of the bytes of an input. Raises InvalidInput or ModelNotFound."""
        region = _checked(self._regions.get(region_slice.region), region_slice, where)
        self.check_total([region_slice.byte_size])
        data = bytearray(region_slice.byte_size)
        done = 0
        while done < len(data):
            count = os.preadv(region.descriptor, [memoryview(data)[done:]], region.offset + region_slice.offset + done)
            if not count:
                raise InvalidInput(
                    f"{where}: Invalid offset + byte size for shared memory region: '{region_slice.region}'"
                )
            done += count
        return data


def write_output(region_slice: RegionSlice, name: str, data: Buffer, held: Sequence[Region]) -> None:
    """Write the bytes of an output. Raises InvalidInput or ModelNotFound.

    held: the regions that the request holds. Another one may have been registered with the same name since.
    """
    region = _checked(
        next((each for each in held if each.name == region_slice.region), None), region_slice, f"output '{name}'"
    )
    if len(data) > region_slice.byte_size:
        raise InvalidInput(
            f"shared memory size specified with the request for output '{name}' ({region_slice.byte_size} bytes) "
            f"should be at least {len(data)} bytes to hold the results"
        )
    start, done, view = region.offset + region_slice.offset, 0, memoryview(data).cast("B")
    if start + len(view) > os.fstat(region.descriptor).st_size:  # it would grow: the client has shrunk it
        raise InvalidInput(
            f"output '{name}': Invalid offset + byte size for shared memory region: '{region_slice.region}'"
        )
    while done < len(view):
        done += os.pwrite(region.descriptor, view[done:], start + done)


def _checked(region: Region | None, region_slice: RegionSlice, where: str) -> Region:
    """Return the region. Raises ModelNotFound if there is none, InvalidInput if the slice is not within it."""
    if region is None:
        raise ModelNotFound(f"{where}: Unable to find shared memory region: '{region_slice.region}'")
    if region_slice.offset >= region.byte_size:
        raise InvalidInput(f"{where}: Invalid offset for shared memory region: '{region_slice.region}'")
    if region_slice.offset + region_slice.byte_size > region.byte_size:
        raise InvalidInput(f"{where}: Invalid offset + byte size for shared memory region: '{region_slice.region}'")
    return region


def require_regions(regions: SharedRegions | None, where: str = "") -> SharedRegions:
    """Return the regions. Raises NotSupported if the operator has not enabled shared memory."""
    if regions is None:
        raise NotSupported(f"{where}: {DISABLED}" if where else DISABLED)
    return regions


def region_names(parameters: Iterable[Mapping[str, Any] | None]) -> list[object]:
    """Return the names of regions among the parameters of tensors."""
    return [each[REGION] for each in parameters if each and REGION in each]


def region_sizes(parameters: Sequence[Mapping[str, Any] | None]) -> list[object]:
    """Return the sizes that inputs in shared memory state."""
    return [each.get(SIZE) for each in parameters if each and REGION in each]


def _open(name: str, key: str) -> int:
    """Open an object of shared memory: a file of this user, no link."""
    try:
        folder = os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(name, flags, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise InvalidInput(f"Unable to open shared memory region: '{key}'") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise InvalidInput(f"Unable to open shared memory region: '{key}'")
    return descriptor
