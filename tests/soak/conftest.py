from tests.slurm.conftest import cancelled, runner  # noqa: F401
