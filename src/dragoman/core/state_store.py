"""The state store: tables of values that outlive the server, in one SQLite file (setting `state`).

An owner (model control, the record store, a feature) takes a table by name, reads its rows once, at the start, and
keeps them in memory as it did without a store. Each change is also passed to the table, which returns at once: one
thread writes the last value of each changed row, all in one transaction. So the event loop never waits for the disk,
and a row that changes 5,000 times a second is written 20 times. `flush` waits until the changes before it are on disk.

The file is locked for as long as the server runs: with two servers the last writer would win. If the file cannot be
written, the server goes on in memory: `problem` says why, readiness, metrics and log show it, and the changes that wait
are written once it is possible again.

| state of the store | `problem` | `flush` returns |
|---|---|---|
| memory: no file was named | "" | False |
| writable | "" | True |
| read-only at the start: rows were read, or none if the file is damaged | the reason | False |
| failing: the disk is full, or the file was removed; changes wait, and the write is tried again | the reason | False |
| closed | as before | False |
"""

import asyncio
import logging
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.core.metrics import Family, Sample

log = logging.getLogger("dragoman.state")

FILE_NAME = "dragoman-state.sqlite"  # in a folder
_APPLICATION = 0x64726167  # `drag`: PRAGMA application_id of our files
_FORMAT = 1  # PRAGMA user_version
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_NEW_TABLE = (
    'CREATE TABLE IF NOT EXISTS "{}" (owner TEXT, key TEXT, value BLOB, PRIMARY KEY (owner, key)) WITHOUT ROWID'
)
# Seconds in which changes gather before they are written, and between attempts after a failed one.
_GATHER_S = 0.05
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
# Seconds between looks at whether the file is still there.
_LOOK_S = 5.0
# Seconds that a server waits at the start for one that still holds the file, and at the end for the last write.
LOCK_WAIT_S = 5.0
_CLOSE_S = 5.0
_FLUSH_S = 10.0
# Bytes of changes that wait to be written; further values are lost at a restart.
MAX_PENDING_BYTES = 128 << 20
_ROW_BYTES = 100  # of a pending row, besides its value

Key = tuple[str, str]  # owner and key


class _Change(NamedTuple):
    """The next value of a row; None deletes it."""

    table: str
    key: Key
    value: bytes | None

    @property
    def bytes(self) -> int:
        return _ROW_BYTES + len(self.value or b"")


class StateTable:
    """Rows of one owner of state: JSON values by key. Keys may have a part before, such as the name of an API key.

    stored_version: the version of the values in the file, at most that of the owner; 0 for a new table.
    """

    def __init__(self, store: "StateStore", name: str, stored_version: int) -> None:
        self._store, self._name = store, name
        self.stored_version = stored_version

    def read(self, value_type: type[Any] | Any = Any) -> dict[Key, Any]:
        """Return all rows, by owner and key. It reads the disk: call it at the start.

        A row that is not a JSON value of `value_type` is left out, with a warning.
        """
        rows: dict[Key, Any] = {}
        for owner, key, data in self._store._rows(self._name):
            try:
                rows[owner, key] = msgspec.json.decode(data, type=value_type)
            except (msgspec.DecodeError, TypeError, UnicodeError) as error:
                log.warning("a row of the state is ignored: table=%s key=%s error=%s", self._name, key[:200], error)
        return rows

    def put(self, key: str, value: Any, owner: str = "") -> None:
        """Set a row to a value that msgspec can encode as JSON; bytes become base64. Any thread may call it."""
        if self._store.is_writable:
            self._store._change(_Change(self._name, (owner, key), msgspec.json.encode(value)))

    def delete(self, key: str, owner: str = "") -> None:
        """Delete a row, if it exists. Any thread may call it."""
        if self._store.is_writable:
            self._store._change(_Change(self._name, (owner, key), None))

    @property
    def outlives_server(self) -> bool:
        """Whether the rows are in a file, though it may not be writable now."""
        return self._store.is_configured

    async def flush(self) -> bool:
        """Wait until all changes so far are on disk; return whether they are. See `StateStore.flush`."""
        return await self._store.flush()


class StateStore:
    """Tables in a file, or in memory if `path` is "".

    path: of the file, or of the folder that contains it. Raises InvalidInput if another server uses it, if it belongs
    to another program or to a newer Dragoman, or if its folder does not exist.
    """

    def __init__(self, path: str = "", *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self.path = state_file(path) if path else None
        self.problem = ""
        self.is_writable = False
        self._lost = 0  # values that were not kept for want of memory
        self._connection: Any = None
        self._using = threading.Lock()  # the connection
        self._changed = threading.Condition()  # guards all below
        self._pending: dict[tuple[str, Key], _Change] = {}
        self._pending_bytes = 0
        self._waiters: list[Future[bool]] = []
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._known: dict[str, int] = {}  # versions of the tables in the file
        self._identity: tuple[int, int] | None = None  # device and inode of the file
        if self.path is not None:
            self._open(self.path, lock_wait_s)

    @property
    def is_configured(self) -> bool:
        """Whether there is a file, though it may not be writable now."""
        return self.path is not None

    def table(self, name: str, version: int = 1) -> StateTable:
        """Return a table, which is created if it does not exist. version: of the values that its owner writes.

        Call it before the server starts. Raises InvalidInput if the file has the table in a newer version.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"name of a table: expected lower-case letters, digits and _, got {name!r}")
        stored = self._known.get(name, 0)
        if stored > version:
            raise InvalidInput(
                f"setting 'state': '{self.path}': table '{name}' has version {stored}, expected {version} or lower: a "
                "newer Dragoman wrote it; start that one, or name another file"
            )
        if self.is_writable and stored != version:
            try:
                with self._using:
                    self._connection.execute(_NEW_TABLE.format(name))
                    self._connection.execute("INSERT OR REPLACE INTO tables VALUES (?, ?)", (name, version))
            except _sqlite().Error as error:
                self._fail(error)
        return StateTable(self, name, stored)

    async def flush(self) -> bool:
        """Wait until all changes so far are on disk; return whether they are, within 10 seconds.

        They outlive the process then, killed or not; a loss of power may take the last of them.
        """
        if not self.is_writable:
            return False
        written: Future[bool] = Future()
        with self._changed:
            self._waiters.append(written)
            self._changed.notify()
        try:
            async with asyncio.timeout(_FLUSH_S):
                return await asyncio.wrap_future(written)
        except TimeoutError:
            return False

    def close(self) -> None:
        """Write all changes and release the file. It blocks for the last write."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                log.error("the state could not be saved: file=%s error=the disk does not answer", self.path)
                return
        self._disconnect()

    def families(self) -> Iterable[Family]:
        """Return the metrics of the store, none without a file."""
        if self.path is None:
            return
        with self._changed:
            pending = len(self._pending)
        for name, kind, text, value in (
            ("dragoman_state_writable", "gauge", "1 if the state store can be written.", not self.problem),
            ("dragoman_state_pending_rows", "gauge", "Changed rows that are not in the state store yet.", pending),
            ("dragoman_state_lost_total", "counter", "Changes that did not fit into memory and are lost.", self._lost),
        ):
            yield Family(name, kind, text, (Sample(name, {}, float(value)),))  # type: ignore[arg-type]

    # --- the file ------------------------------------------------------------------------------------------------

    def _open(self, path: Path, lock_wait_s: float) -> None:
        """Open the file and lock it; if it cannot be written, read its rows; if it is damaged, do without."""
        sqlite3 = _sqlite()
        try:
            if not path.exists():  # of another server that runs in this process, opening it would drop the lock
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            self._connection, self._known = _open_to_write(path, lock_wait_s)
            self._identity = _identity(path)
            self.is_writable = True
        except (sqlite3.Error, OSError) as error:
            self._open_to_read(path, error)
        if self.is_writable:
            self._thread = threading.Thread(target=self._write_changes, name="dragoman-state", daemon=True)
            self._thread.start()

    def _open_to_read(self, path: Path, error: Exception) -> None:
        """Read a file that cannot be written, as on a read-only file system, with what its last server has left."""
        try:
            self._connection = _connect(f"{path.as_uri()}?immutable=1", 0.0)
            self._known = _versions(self._connection)
        except (_sqlite().Error, OSError):
            self._disconnect()
        read = "its rows are used" if self._known else "nothing of it could be read"
        self.problem = f"the state cannot be saved: {error}"
        log.error("the state cannot be saved, and changes end with the server: file=%s error=%s; %s", path, error, read)

    def _disconnect(self) -> None:
        with self._using:
            connection, self._connection = self._connection, None
            self.is_writable = False
            if connection is not None:
                with suppress(_sqlite().Error):
                    connection.close()

    def _rows(self, table: str) -> list[tuple[str, str, bytes]]:
        with self._using:
            if self._connection is None or table not in self._known:
                return []
            try:
                return [*self._connection.execute(f'SELECT owner, key, value FROM "{table}"')]  # noqa: S608
            except _sqlite().Error as error:
                self._fail(error)
                return []

    # --- changes ---------------------------------------------------------------------------------------------------

    def _change(self, change: _Change) -> None:
        for text in change.key:
            text.encode()  # one that is not Unicode would make every later write fail
        with self._changed:
            before = self._pending.pop((change.table, change.key), None)
            self._pending_bytes += change.bytes - (before.bytes if before is not None else 0)
            if self._pending_bytes > MAX_PENDING_BYTES:
                self._pending_bytes -= change.bytes
                self._lost += 1
                return
            self._pending[change.table, change.key] = change
            if len(self._pending) == 1:
                self._changed.notify()

    def _fail(self, error: object) -> None:
        if not self.problem:
            log.error("the state cannot be saved: file=%s error=%s; it is tried again", self.path, error)
        self.problem = f"the state cannot be saved: {error}"

    def _write_changes(self) -> None:
        """Write changes until `close`, in a thread of its own."""
        attempt = 0
        while True:
            with self._changed:
                if not (self._pending or self._waiters or self._is_closing):
                    self._changed.wait(_LOOK_S)
                if not (self._waiters or self._is_closing):
                    delay_s = _RETRY_S[min(attempt, len(_RETRY_S)) - 1] if attempt else _GATHER_S
                    self._changed.wait_for(lambda: self._waiters or self._is_closing, delay_s)
                changes, waiters, is_last = [*self._pending.values()], self._waiters, self._is_closing
                self._waiters = []
            error = self._write(changes)
            if error is None:
                self._note_written(changes)
                attempt = 0
            else:
                self._fail(error)
                attempt += 1
            for waiter in waiters:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(error is None)
            if is_last:
                return

    def _write(self, changes: Iterable[_Change]) -> Exception | None:
        """Write changes in one transaction; return the error if that failed, of which nothing is written then."""
        sqlite3 = _sqlite()
        with self._using:
            connection = self._connection
            if connection is None or self.path is None:
                return ValueError("the store is closed")
            try:
                if _identity(self.path) != self._identity:
                    return FileNotFoundError("the file was removed or replaced while the server ran")
                connection.execute("BEGIN IMMEDIATE")
                for table, (owner, key), value in changes:
                    if value is None:
                        connection.execute(f'DELETE FROM "{table}" WHERE owner = ? AND key = ?', (owner, key))  # noqa: S608
                    else:
                        connection.execute(f'INSERT OR REPLACE INTO "{table}" VALUES (?, ?, ?)', (owner, key, value))  # noqa: S608
                connection.execute("COMMIT")
            except (sqlite3.Error, OSError) as error:  # such as a full disk
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                return error
        return None

    def _note_written(self, changes: Iterable[_Change]) -> None:
        with self._changed:
            for change in changes:
                if self._pending.get((change.table, change.key)) is change:
                    del self._pending[change.table, change.key]
                    self._pending_bytes -= change.bytes
        if self.problem:
            log.info("the state is saved again: file=%s", self.path)
            self.problem = ""


def check_state(path: str) -> None:
    """Raise InvalidInput if a store could not be opened, or only without its rows or without saving changes.

    Nothing is created: of a file that does not exist yet, or is empty, only the folder is checked.
    """
    file = state_file(path)
    try:
        if file.exists() and file.stat().st_size:
            _open_to_write(file, 0.0)[0].close()
        elif not os.access(file if file.exists() else file.parent, os.W_OK):
            raise PermissionError(f"no permission to write '{file}'")
    except (_sqlite().Error, OSError) as error:
        raise InvalidInput(f"setting 'state': the state cannot be saved: {error}") from error


def _sqlite() -> Any:
    """Return the module of SQLite, which takes some milliseconds to import. Raises InvalidInput without it."""
    try:
        import sqlite3
    except ModuleNotFoundError as error:
        raise InvalidInput("setting 'state': expected a Python with the module sqlite3, got one without it") from error
    return sqlite3


def state_file(path: str) -> Path:
    """Return the absolute path of the file that the setting names. Raises InvalidInput without its folder."""
    file = Path(path).absolute()
    file = file / FILE_NAME if file.is_dir() else file
    if not file.parent.is_dir():
        raise InvalidInput(f"setting 'state': expected a file in a folder that exists, got '{path}'")
    return file


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file, None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _connect(uri: str, lock_wait_s: float) -> Any:
    """Return a connection that any thread may use, without transactions of its own."""
    return _sqlite().connect(uri, uri=True, timeout=lock_wait_s, isolation_level=None, check_same_thread=False)


def _open_to_write(path: Path, lock_wait_s: float) -> tuple[Any, dict[str, int]]:
    """Return a connection that has locked a file for itself, and the versions of its tables.

    Raises InvalidInput if another server uses the file or it is not ours, sqlite3.Error or OSError if it is damaged or
    cannot be written.
    """
    sqlite3 = _sqlite()
    connection = _connect(path.as_uri(), lock_wait_s)
    try:
        return connection, _prepare(connection, path)
    except BaseException as error:
        with suppress(sqlite3.Error):
            connection.close()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise InvalidInput(
                f"setting 'state': '{path}' is in use by another server: expected a file of this server alone"
            ) from error
        raise


def _prepare(connection: Any, path: Path) -> dict[str, int]:
    """Lock a file for this connection, and make it ours if it is empty. Return the versions of its tables.

    Raises InvalidInput if it belongs to another program, sqlite3.Error if it is locked, damaged or read-only.
    """
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != _APPLICATION and not is_new:
        raise InvalidInput(f"setting 'state': expected a state file of Dragoman, got '{path}' of another program")
    if (found := connection.execute("PRAGMA user_version").fetchone()[0]) > _FORMAT:
        raise InvalidInput(
            f"setting 'state': '{path}' has format {found}, expected {_FORMAT} or lower: a newer Dragoman wrote it; "
            "start that one, or name another file"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if (damage := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise _sqlite().DatabaseError(f"the file is damaged: {damage}")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {_FORMAT}")
    connection.execute("CREATE TABLE IF NOT EXISTS tables (name TEXT PRIMARY KEY, version INTEGER) WITHOUT ROWID")
    connection.execute("COMMIT")
    return _versions(connection)


def _versions(connection: Any) -> dict[str, int]:
    return dict(connection.execute("SELECT name, version FROM tables"))
