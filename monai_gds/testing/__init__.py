"""Tests that a storage backend of another package runs over itself. Needs ``pip install 'monai_gds[testing]'``.

Derive a class, give it a ``backend`` fixture, and run pytest::

    import pytest, torch
    from monai_gds.testing import BackendContract
    from mypackage.mydrive import MyDriveBackend

    class TestMyDrive(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyDriveBackend(torch.device("cpu"))

Which class to derive from:

* :class:`BackendContract` for a backend on :class:`monai_gds.storage.blocking.BlockingBackend` or
  :class:`monai_gds.storage.queue.QueueBackend`: it tests everything that such a backend can get wrong. What these two
  classes promise on behalf of their subclasses is tested in the project's repository.
* :class:`WriteContract` in addition, for a backend that overrides ``Backend.write``.
* :class:`CudaBackendContract` for CUDA targets. It adds streams, and memory that is freed and used again. Its tests
  carry the marker ``gpu``, which the project's pytest settings must declare.

Two more fixtures may be overridden: ``storage``, if :class:`monai_gds.storage.Storage` should be made in another way
than around ``backend``, and ``shared_folder``, if a backend reads only from some file systems.
"""

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError as e:
    raise ImportError(f"monai_gds.testing needs {e.name}: pip install 'monai_gds[testing]'", name=e.name) from e

for _module in ("base", "contract", "cuda", "errors", "life", "memory", "reads"):
    pytest.register_assert_rewrite(f"monai_gds.testing.{_module}")

from monai_gds.testing.contract import BackendContract, WriteContract  # noqa: E402
from monai_gds.testing.cuda import CudaBackendContract  # noqa: E402

__all__ = ["BackendContract", "CudaBackendContract", "WriteContract"]
