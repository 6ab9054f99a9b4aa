"""Identity of a server and what it allows, for its metadata and model control."""

from dataclasses import dataclass

from dragoman._version import __version__
from dragoman.core.calls import ServerDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """Name, version and extensions of the server, for its metadata.

    `control_token` authorizes model control; "" disables it unless `control_open` is set. It also shows the reasons of
    failed loads, as does `has_open_reasons`. `default_model` answers calls without a model name; "" leaves these to the
    only model that can. Without `load_at_start` models are loaded on request only, and the server is ready without any.
    `loads_new_models`: whether `sync` loads models that were not on disk before. `has_texts_of_mlserver`: errors about
    unknown models read as in MLServer.
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
    has_texts_of_mlserver: bool = False

    @property
    def description(self) -> ServerDescription:
        return ServerDescription(self.name, self.version, self.extensions)
