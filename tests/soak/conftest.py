from tests.slurm.conftest import bench, cancelled  # noqa: F401
