"""The service: files and batches of keys, and the job that runs a batch.

A batch is a job. Its folder has the input, as a link to the file or as lines of their own, and the journal. When all
lines are answered, the journal becomes the output file: as it is if all lines succeeded, else its lines are divided
between the output and the error file. Their ids follow from that of the batch, so that a server that is killed in
between makes the same files again.

    status        waits for                     becomes
    validating    a look at all lines           in_progress; failed
    in_progress   the lines                     finalizing; failed if the disk is full or the key is gone
    cancelling    the lines that run            cancelled
    finalizing    the files of results          completed, expired
"""

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from dragoman.core.calls import Request
from dragoman.core.errors import DragomanError, InvalidInput, NotSupported, RateLimited, ServerError
from dragoman.core.jobs import Job
from dragoman.core.metrics import Family, Sample
from dragoman.core.services import ServiceContext, WireResponse
from dragoman_batches import calls
from dragoman_batches.batch import ENDED, Api, Batch, BatchProblem, Status
from dragoman_batches.errors import ObjectNotFound
from dragoman_batches.files import TABLE_VERSION, FileStore, StoredFile, storage_error, write_file
from dragoman_batches.input import CheckedInput, check_input
from dragoman_batches.journal import Journal, publish, select
from dragoman_batches.results import format_result, format_unsent, line_id
from dragoman_batches.runner import LineGate, LineRun

A = TypeVar("A")
log = logging.getLogger("dragoman.batches")

KIND = "batch"
_MESSAGES = "/v1/messages"
_INPUT, _JOURNAL, _UNSENT = "input.jsonl", "results.jsonl", "unsent.jsonl"
# What a client waits that has as many batches as it may.
_RETRY_S = 60.0
_SWEEP_S = 30.0
# Batches that have ended are kept for this time, as many of each owner. Files of results are not affected.
_KEEP_S = 30 * 86400.0
_MAX_ENDED = 1000


class BatchService:
    """A `Service`, and the `JobKind` of batches."""

    def __init__(self, context: ServiceContext) -> None:
        settings = context.settings
        self._settings, self._jobs, self._sender = settings, context.jobs, context.sender
        self._files = FileStore(
            context.store.table("files", TABLE_VERSION),
            context.folder / "files",
            max_files=settings.max_files,
            max_bytes=settings.max_files_bytes,
        )
        self._gate = LineGate(settings.max_batch_calls, context.sender.is_busy)
        self._batches: dict[str, Batch] = {}  # of jobs that run, by id: their counts change with each line
        self._runs: dict[str, LineRun] = {}
        self._journals: dict[str, Journal] = {}
        self._ended: Counter[Status] = Counter()
        self._lines: Counter[str] = Counter()  # since the start, by outcome
        self._sweeping: asyncio.Task[None] | None = None
        context.jobs.register(KIND, self)

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            self._files.delete_expired()
            oldest_s = time.time() - _KEEP_S
            ended = Counter[str]()
            for job in reversed([job for job in self._jobs.of(KIND) if job.ended]):
                ended[job.caller.owner] += 1
                if job.created_s < oldest_s or ended[job.caller.owner] > _MAX_ENDED:
                    await self._jobs.delete(job)
            await asyncio.sleep(_SWEEP_S)

    # --- calls ---------------------------------------------------------------------------------------------------

    async def answer(self, request: Request[Any]) -> Any:
        owner = request.caller.owner
        match request.call:
            case calls.AddFile() as call:
                return await self._add_file(call, owner)
            case calls.ReadFile(file_id):
                return self._files.find(file_id, owner)
            case calls.OpenFile(file_id):
                file = self._files.find(file_id, owner)
                return file, str(self._files.path(file.id))
            case calls.ListFiles():
                return self._files.of(owner)
            case calls.DeleteFile(file_id):
                await self._files.delete(file_id, owner)
                await self._files.saved()
            case calls.CreateBatch() as call:
                return await self._create(call, request)
            case calls.CreateMessageBatch() as call:
                return await self._create_messages(call, request)
            case calls.ReadBatch(batch_id, api):
                return self._batch(self._find(batch_id, owner, api))
            case calls.ListBatches(api):
                return [batch for job in self._jobs.of(KIND, owner) if (batch := self._batch(job)).api == api]
            case calls.CancelBatch(batch_id, api):
                return await self._cancel(self._find(batch_id, owner, api))
            case calls.DeleteBatch(batch_id, api):
                await self._delete(self._find(batch_id, owner, api))
            case calls.OpenResults(batch_id):
                return self._results(self._find(batch_id, owner, "anthropic"))
            case _:
                raise NotImplementedError(type(request.call).__name__)
        return None

    async def _add_file(self, call: calls.AddFile, owner: str) -> StoredFile:
        file = await self._files.add(owner, call.filename, call.purpose, call.data, call.expires_after_s)
        await self._files.saved()
        return file

    def _find(self, batch_id: str, owner: str, api: Api) -> Job:
        job = self._jobs.find(batch_id, owner, KIND)
        if job is None or job.data.get("api") != api:
            raise ObjectNotFound(f"no such batch: '{batch_id[:100]}'")
        return job

    def _batch(self, job: Job) -> Batch:
        """Return the batch of a job, with the counts of now."""
        batch = self._batches.get(job.id) or msgspec.convert(job.data, Batch)
        journal = self._journals.get(job.id)
        if journal is not None and not batch.has_ended:
            batch = replace(batch, completed=journal.succeeded, failed=journal.failed)
        return batch

    def _results(self, job: Job) -> str:
        batch = self._batch(job)
        if not batch.has_ended:
            raise InvalidInput(f"batch '{batch.id}' has no results yet: expected processing_status ended")
        return str(self._jobs.folder(job.id) / _JOURNAL)

    async def _create(self, call: calls.CreateBatch, request: Request[Any]) -> Batch:
        owner = request.caller.owner
        self._check_place(owner)
        file = self._files.find(call.input_file_id, owner)
        if file.purpose != "batch":
            raise InvalidInput(f"`input_file_id`: expected a file with the purpose batch, got {file.purpose!r}")
        now_s = time.time()
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            api="openai",
            created_s=now_s,
            expires_s=now_s + call.window_s,
            input_file_id=file.id,
            endpoint=call.endpoint,
            window=call.window,
            metadata=call.metadata,
            output_expires_after_s=call.output_expires_after_s,
        )
        try:
            os.link(self._files.path(file.id), self._jobs.folder(batch.id) / _INPUT)  # it may be deleted meanwhile
        except OSError as error:
            raise storage_error(error) from error
        return await self._begin(batch, request)

    async def _create_messages(self, call: calls.CreateMessageBatch, request: Request[Any]) -> Batch:
        self._check_place(request.caller.owner)
        if len(call.lines) > self._settings.max_batch_lines:
            raise InvalidInput(f"`requests`: expected at most {self._settings.max_batch_lines}, got {len(call.lines)}")
        most = self._settings.max_body_bytes
        for number, line in enumerate(call.lines):
            if len(line) > most:
                raise InvalidInput(f"`requests[{number}]`: expected at most {most} bytes, got {len(line)}")
        if self._sender.route(_MESSAGES) != "infer":
            raise NotSupported(f"this server has no {_MESSAGES}: expected 'anthropic' in the setting protocols")
        now_s = time.time()
        batch_id = f"msgbatch_{secrets.token_hex(12)}"
        try:
            path = self._jobs.folder(batch_id) / _INPUT
        except OSError as error:
            raise storage_error(error) from error
        await asyncio.to_thread(write_file, path, call.lines)
        batch = Batch(
            id=batch_id, api="anthropic", created_s=now_s, expires_s=now_s + call.window_s, total=len(call.lines)
        )
        return await self._begin(batch, request)

    def _check_place(self, owner: str) -> None:
        running = sum(not job.ended for job in self._jobs.of(KIND, owner))
        if running >= self._settings.max_batches:
            raise RateLimited(f"this key has {running} batches that have not ended, which is its limit", _RETRY_S)

    async def _begin(self, batch: Batch, request: Request[Any]) -> Batch:
        job = Job(
            id=batch.id,
            kind=KIND,
            number=self._jobs.next_number(),
            caller=request.caller,
            models=request.models,
            created_s=batch.created_s,
            data=msgspec.to_builtins(batch),
        )
        self._jobs.put(job)
        await self._jobs.saved()
        return batch

    async def _cancel(self, job: Job) -> Batch:
        batch = self._batch(job)
        if batch.has_ended:
            if batch.api == "anthropic":
                return batch
            raise InvalidInput(f"batch '{batch.id}' cannot be cancelled: it is {batch.status}")
        if batch.status not in ("cancelling", "finalizing"):
            batch = self._save(job.id, job.caller.owner, self._with_status(batch, "cancelling"))
            await self._jobs.saved()
            if (run := self._runs.get(job.id)) is not None:
                run.stop()
        return batch

    async def _delete(self, job: Job) -> None:
        batch = self._batch(job)
        if not batch.has_ended:
            raise InvalidInput(f"batch '{batch.id}' cannot be deleted: it is in progress; cancel it first")
        await self._jobs.delete(job)
        await self._jobs.saved()

    # --- the job -------------------------------------------------------------------------------------------------

    def _save(self, batch_id: str, owner: str, batch: Batch) -> Batch:
        self._batches[batch_id] = batch
        job = self._jobs.find(batch_id, owner, KIND)
        if job is not None:
            self._jobs.put(msgspec.structs.replace(job, ended=batch.has_ended, data=msgspec.to_builtins(batch)))
        return batch

    @staticmethod
    def _with_status(batch: Batch, status: Status) -> Batch:
        return replace(batch, status=status, times_s={**batch.times_s, status: time.time()})

    async def run(self, job: Job) -> None:
        """Run a batch from where it is."""
        owner = job.caller.owner
        job = self._jobs.find(job.id, owner, KIND) or job  # it may have been cancelled before it began
        try:
            await self._run(job, owner)
        except Exception as error:
            fault = _public(error)
            code = {"Forbidden": "key_revoked", "StorageFull": "storage_full"}.get(type(fault).__name__, "server_error")
            log.error("a batch failed: batch=%s error=%s", job.id, fault.message)
            await self._end_failed(job, owner, BatchProblem(code, fault.message))
        finally:
            self._runs.pop(job.id, None)
            journal = self._journals.pop(job.id, None)
            if journal is not None:
                journal.close()
            self._batches.pop(job.id, None)

    async def _run(self, job: Job, owner: str) -> None:
        folder = self._jobs.folder(job.id)
        batch = self._batches[job.id] = msgspec.convert(job.data, Batch)
        checked = await self._check(batch, folder)
        if checked.problems:
            batch = replace(batch, problems=checked.problems, total=0)
            self._end(job, owner, self._with_status(batch, "failed"))
            return
        journal = self._journals[job.id] = await _in_thread(Journal, folder / _JOURNAL)
        batch = replace(self._batches[job.id], total=len(checked.input))  # it may be cancelling meanwhile
        if batch.status == "validating":
            batch = self._with_status(batch, "in_progress")
        self._save(job.id, owner, batch)
        if batch.status == "in_progress":
            await self._send_lines(job, batch, checked, journal)
        await _in_thread(journal.sync)
        await self._finalize(job, owner, checked, journal)

    async def _check(self, batch: Batch, folder: Path) -> CheckedInput:
        return await asyncio.to_thread(
            check_input,
            folder / _INPUT,
            endpoint=batch.endpoint or _MESSAGES,
            max_lines=self._settings.max_batch_lines,
            max_line_bytes=self._settings.max_body_bytes,
            role_of=self._role_of,
        )

    def _role_of(self, path: str) -> str:
        """Return the role that a path of a line needs: lines reach models, and no files or batches."""
        is_own = path.startswith(("//", "/v1/files", "/v1/batches", "/v1/messages/batches"))
        return "" if is_own else self._sender.route(path)

    async def _send_lines(self, job: Job, batch: Batch, checked: CheckedInput, journal: Journal) -> None:
        def send(path: str, body: bytes, request_id: str) -> Any:
            return self._sender.send(path, body, job.caller, job.models, request_id)

        def format_line(number: int, custom_id: str, response: WireResponse) -> bytes:
            self._lines["succeeded" if response.status < 400 else "failed"] += 1
            return format_result(batch.api, batch.id, number, custom_id, response)

        run = self._runs[job.id] = LineRun(
            checked.input,
            journal,
            send,
            format_line,
            self._gate,
            owner=job.caller.owner,
            deadline_s=batch.expires_s,
            line_id=lambda number: line_id(batch.id, number),
        )
        await run.run()

    async def _finalize(self, job: Job, owner: str, checked: CheckedInput, journal: Journal) -> None:
        batch = self._batches[job.id]
        count, total = journal.succeeded + journal.failed, len(checked.input)
        is_cancelled = batch.status == "cancelling"
        if not is_cancelled and batch.status != "finalizing":
            batch = self._save(job.id, owner, self._with_status(batch, "finalizing"))
        batch = replace(batch, completed=journal.succeeded, failed=journal.failed)
        unsent = range(journal.lines, total)
        if batch.api == "anthropic":
            records = self._unsent(batch, checked, unsent, expired=not is_cancelled)
            await _in_thread(_append_all, journal, records)
        else:
            keeps = not is_cancelled  # OpenAI reports lines that expired, not those that were cancelled
            records = self._unsent(batch, checked, unsent if keeps else range(0), expired=True)
            batch = await self._publish(job, owner, batch, journal, records)
        rest = {"cancelled": total - count} if is_cancelled else {"expired": total - count}
        self._lines.update(rest)
        status: Status = "cancelled" if is_cancelled else "expired" if total > count else "completed"
        self._end(job, owner, self._with_status(replace(batch, **rest), status))
        if await self._jobs.saved():
            await asyncio.to_thread(_remove, self._jobs.folder(job.id), keeps_results=batch.api == "anthropic")

    @staticmethod
    def _unsent(batch: Batch, checked: CheckedInput, numbers: range, *, expired: bool) -> Iterator[bytes]:
        for number in numbers:
            yield format_unsent(batch.api, batch.id, number, checked.input.line(number).custom_id, expired=expired)

    async def _publish(self, job: Job, owner: str, batch: Batch, journal: Journal, unsent: Iterable[bytes]) -> Batch:
        """Make the files of results: output of lines that succeeded, errors of those that failed or were not sent."""
        hex_id = batch.id.rpartition("_")[2]
        found = dict[str, str]()
        errors = [*unsent] if journal.lines < batch.total else []
        for name, count in (("output", journal.succeeded), ("error", journal.failed + len(errors))):
            if not count:
                continue
            file_id = f"file-{hex_id}{name}"
            path = self._files.path(file_id)
            if name == "output" and not journal.failed:
                size, checksum = await _in_thread(publish, journal.path, path)
            else:
                parts = select(journal.path, succeeded=name == "output")
                lines = parts if name == "output" else chain(parts, errors)
                size, checksum = await _in_thread(write_file, path, lines)
            self._files.adopt(
                owner, file_id, f"{batch.id}_{name}.jsonl", "batch_output", size, checksum, batch.output_expires_after_s
            )
            found[f"{name}_file_id"] = file_id
        return replace(batch, **found)

    async def _end_failed(self, job: Job, owner: str, problem: BatchProblem) -> None:
        """End a batch that cannot go on. What was answered becomes its output file, if that is possible."""
        batch, journal = self._batches[job.id], self._journals.get(job.id)
        batch = replace(batch, problems=(problem,))
        if journal is not None:
            batch = replace(batch, completed=journal.succeeded, failed=journal.failed)
            if journal.lines and batch.api == "openai":
                file_id = f"file-{batch.id.rpartition('_')[2]}output"
                with suppress(OSError):
                    size, checksum = await asyncio.to_thread(publish, journal.path, self._files.path(file_id))
                    name = f"{batch.id}_output.jsonl"
                    self._files.adopt(
                        owner, file_id, name, "batch_output", size, checksum, batch.output_expires_after_s
                    )
                    batch = replace(batch, output_file_id=file_id)
        self._end(job, owner, self._with_status(batch, "failed"))

    def _end(self, job: Job, owner: str, batch: Batch) -> None:
        self._ended[batch.status] += 1
        self._save(job.id, owner, batch)
        log.info(
            "a batch has ended: batch=%s status=%s lines=%d completed=%d failed=%d",
            batch.id, batch.status, batch.total, batch.completed, batch.failed,
        )  # fmt: skip

    # --- metrics -------------------------------------------------------------------------------------------------

    def families(self) -> Iterable[Family]:
        counts: Counter[str] = Counter(self._batch(job).status for job in self._jobs.of(KIND) if not job.ended)
        running = {status: counts[status] for status in ("validating", "in_progress", "finalizing", "cancelling")}
        yield _family("batch_jobs", "gauge", "Batches that have not ended, by status.", "status", running)
        ended: dict[str, int] = {status: self._ended[status] for status in sorted(ENDED)}
        yield _family("batches_ended_total", "counter", "Batches that have ended, by status.", "status", ended)
        outcomes = {name: self._lines[name] for name in ("succeeded", "failed", "expired", "cancelled")}
        yield _family("batch_lines_total", "counter", "Lines of batches, by outcome.", "outcome", outcomes)
        yield _family("batch_lines_running", "gauge", "Lines of batches that run.", "", {"": self._gate.running})
        yield _family("files", "gauge", "Stored files.", "", {"": len(self._files)})
        yield _family("files_bytes", "gauge", "Bytes of stored files.", "", {"": self._files.bytes})


def _family(name: str, kind: Any, text: str, label: str, values: Mapping[str, int]) -> Family:
    full = f"dragoman_{name}"
    samples = (Sample(full, {label: key} if label else {}, float(value)) for key, value in values.items())
    return Family(full, kind, text, tuple(samples))


def _append_all(journal: Journal, records: Iterator[bytes]) -> None:
    while some := [*islice(records, 1000)]:
        journal.append(some)
    journal.sync()


def _public(error: Exception) -> DragomanError:
    """Return the error for the client; log an unexpected one."""
    if isinstance(error, DragomanError):
        return error
    if isinstance(error, OSError):
        return storage_error(error)
    log.error("unexpected error in a batch", exc_info=error)
    return ServerError("internal error; the log of the server has more")


async def _in_thread(function: Callable[..., A], *arguments: Any) -> A:
    """Return what a function returns in a thread. If this is cancelled, it still ends first: it uses the journal."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _remove(folder: Path, *, keeps_results: bool) -> None:
    """Delete the files of a batch that has ended."""
    for path in folder.iterdir():
        if not (keeps_results and path.name == _JOURNAL):
            path.unlink(missing_ok=True)
    if not keeps_results:
        folder.rmdir()
