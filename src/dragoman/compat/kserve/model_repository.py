"""Models by name, for scripts that register them."""

from pathlib import Path

from dragoman.compat.kserve.model import BaseKServeModel

MODEL_MOUNT_DIRS = "/mnt/models"


class ModelRepository:
    """The models that a script registers; loading at run time is done by the server's own repository."""

    def __init__(self, models_dir: str = MODEL_MOUNT_DIRS) -> None:
        self.models: dict[str, BaseKServeModel] = {}
        self.models_dir = models_dir

    def load_models(self) -> None:
        """Load a model for each folder in `models_dir`, as the constructors of KServe's own repositories do."""
        for path in sorted(Path(self.models_dir).iterdir()):
            if path.is_dir():
                self.load_model(path.name)

    def load_model(self, name: str) -> bool:
        """Load a model and `update` it; for derived classes to write."""
        return False

    def set_models_dir(self, models_dir: str) -> None:
        self.models_dir = models_dir

    def get_model(self, name: str) -> BaseKServeModel | None:
        return self.models.get(name)

    def get_models(self) -> dict[str, BaseKServeModel]:
        return self.models

    async def is_model_ready(self, name: str) -> bool:
        model = self.get_model(name)
        return model is not None and await model.healthy()

    def update(self, model: BaseKServeModel, name: str | None = None) -> None:
        self.models[name or model.name] = model

    def unload(self, name: str) -> None:
        """Stop a model and forget it. Raises KeyError."""
        if name not in self.models:
            raise KeyError(f"model with name {name} does not exist")
        self.models.pop(name).stop()
