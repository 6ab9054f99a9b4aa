"""Models whose configuration or files a client has sent, in private temporary folders."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from dragoman import plugins
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.engine.repository import Repository, Source
from dragoman.system.files import TemporaryFolder
from dragoman.system.process import explain_temporary_folder


class SentModels:
    """Writes sent files, and removes the folder of a model once no version of it is loaded or being loaded."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._uses: dict[Path, int] = {}
        self._folders: dict[Path, TemporaryFolder] = {}

    @asynccontextmanager
    async def source(
        self, name: str, find: Callable[[], Source], config: str = "", files: Mapping[str, bytes] = MappingProxyType({})
    ) -> AsyncIterator[Source]:
        """Return the source of a model whose folder is replaced by `files`, or whose configuration by `config`.

        Without these it is the source that `find` returns. Raises InvalidInput. Nothing is left of the files unless
        versions are held by the end of the context.
        """
        if not (files or config):
            yield await asyncio.to_thread(find)
            return
        folder = _new_folder()
        root = folder.path
        self._folders[root], self._uses[root] = folder, 1
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, root, name, find, config, files))
        try:
            yield await asyncio.shield(writing)
        finally:
            await asyncio.wait({writing})
            self._release(root)

    def _write(
        self, root: Path, name: str, find: Callable[[], Source], config: str, files: Mapping[str, bytes]
    ) -> Source:
        if not files:
            source = find()
            specs = source.specs()
            replaced = plugins.runtime(specs[0].runtime).config_file
            if not replaced:
                from dragoman.engine.config_overrides import overridden_settings  # imports protobuf

                settings = overridden_settings(name, config)
                return Source(lambda: [replace(spec, **settings) for spec in specs], source.routing)
            files = {replaced: config.encode()}
            _link(Path(specs[0].parameters["source"]).parent, root / name, replaced)
        try:
            for path, content in files.items():
                file = root / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            source = self._repository.at_folder(name, root / name)
            specs = source.specs()
        except (InvalidInput, OSError) as error:
            raise InvalidInput(f"failed to load '{name}', {str(error).replace(f'{root}/', '')}") from error
        return Source(lambda: specs, source.routing)

    def hold(self, specs: Iterable[ModelSpec]) -> None:
        """Keep the folders of versions that are to be loaded."""
        for spec in specs:
            for root in self._roots(spec):
                self._uses[root] += 1

    def release(self, spec: ModelSpec) -> None:
        """Release the folder of a version that is closed."""
        for root in self._roots(spec):
            self._release(root)

    def _release(self, root: Path) -> None:
        self._uses[root] -= 1
        if not self._uses[root]:
            del self._uses[root]
            self._folders.pop(root).cleanup()

    def _roots(self, spec: ModelSpec) -> list[Path]:
        return [root for root in self._uses if Path(spec.uri).is_relative_to(root)]


def _new_folder() -> TemporaryFolder:
    """Create a folder that only this user can read. Raises ModelFailed."""
    try:
        return TemporaryFolder("sent")
    except OSError as error:
        raise ModelFailed(f"files of a model cannot be stored: {explain_temporary_folder(error)}") from error


def _link(source: Path, folder: Path, replaced: str) -> None:
    """Create a folder with links to all files of another one but the one that is replaced."""
    folder.mkdir()
    for entry in source.iterdir():
        if entry.name != replaced:
            (folder / entry.name).symlink_to(entry.resolve())
