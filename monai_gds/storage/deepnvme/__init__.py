"""The DeepNVMe wing: two storage backends over DeepSpeed's file operators (https://www.deepspeed.ai/tutorials/deepnvme/).

* ``deepnvme`` reads and writes with ``aio_handle``: libaio and O_DIRECT, through page-locked host memory. It serves
  drives that DeepSpeed's tuner has been run on, and comparisons with DeepNVMe on the same files.
* ``deepnvme-gds`` reads and writes with ``gds_handle``: cuFile, straight into GPU memory. CUDA targets only.

DeepSpeed's operators are compiled once per machine (:mod:`.build`). Both bypass the page cache, report success whatever
happened, and end the process on many errors. So whatever they move is verified (:mod:`.verified`), and ``gds_handle``
runs in a separate process.
"""

from monai_gds.storage.deepnvme.settings import Settings

__all__ = ["Settings"]
