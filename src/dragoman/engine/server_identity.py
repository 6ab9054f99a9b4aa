"""Identity of a server and what it allows, for its metadata and model control."""

import msgspec

from dragoman._version import __version__
from dragoman.core.calls import ServerDescription
from dragoman.core.dialect import OWN, Dialect


class ServerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Name, version and extensions of the server, for its metadata.

    `control_token` authorizes model control; "" disables it unless `control_open` is set. It also shows the reasons of
    failed loads, as does `has_open_reasons`. `default_model` answers calls without a model name; "" leaves these to the
    only model that can. Without `load_at_start` models are loaded on request only, and the server is ready without any.
    `loads_new_models`: whether `sync` loads models that were not on disk before. `dialect`: of errors about models that
    have none of their own.
    """

    name: str = "dragoman"
    version: str = __version__
    extensions: tuple[str, ...] = ()
    control_token: str = ""
    control_open: bool = False
    has_open_reasons: bool = False
    default_model: str = ""
    load_at_start: bool = True
    loads_new_models: bool = True
    dialect: Dialect = OWN

    def describe(self, problems: tuple[str, ...] = ()) -> ServerDescription:
        """Return the metadata of the server with its current problems."""
        return ServerDescription(self.name, self.version, self.extensions, problems)
