"""Model files: on Kubernetes, KServe's storage initializer downloads them to `/mnt/models` before the server starts."""

from pathlib import Path
from urllib.parse import urlsplit

from dragoman.compat.kserve.errors import ModelMissingError


class Storage:
    """Access to model files on this machine."""

    @staticmethod
    def download(uri: str, out_dir: str | None = None) -> str:
        """Return the path of a local file or folder. Raises ModelMissingError for any other URI."""
        parts = urlsplit(uri)
        path = Path(parts.path if parts.scheme == "file" else uri)
        if parts.scheme not in ("", "file") or not path.exists():
            raise ModelMissingError(f"'{uri}' not found: expected a file or folder on this machine")
        if out_dir is not None and Path(out_dir).resolve() != path.resolve():
            raise ModelMissingError(f"'{uri}' is used where it is: expected no out_dir, got '{out_dir}'")
        return str(path)
