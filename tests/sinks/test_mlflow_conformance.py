"""The MLflow sink passes the suite that every sink inherits, on a server and on a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from runmirror.sinks.base import Sink
from runmirror.sinks.mlflow import MlflowOptions, MlflowSink
from runmirror.testing.conformance import SinkConformance
from tests.servers.mlflow import MlflowServer


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


class OneExperimentPerFolder(SinkConformance):
    """A place in the tracker is an experiment, named after the folder."""

    uri: str

    def make_sink(self, folder: Path) -> Sink:
        return MlflowSink(MlflowOptions(tracking_uri=self.uri, experiment=str(folder)))


class TestMlflowDatabase(OneExperimentPerFolder):
    @pytest.fixture(autouse=True)
    def _place(self, database: str) -> None:
        self.uri = database


@pytest.mark.slow
class TestMlflowServer(OneExperimentPerFolder):
    @pytest.fixture(autouse=True)
    def _place(self, mlflow: MlflowServer) -> None:
        self.uri = mlflow.url
