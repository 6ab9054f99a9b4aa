"""A class without a server."""
# mypy: ignore-errors

from kserve import Model


class Plain(Model):
    """Count the rows."""

    def predict(self, payload, headers=None):
        return {"predictions": [len(payload["instances"])]}
