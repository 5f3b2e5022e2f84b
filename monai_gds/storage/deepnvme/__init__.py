"""The DeepNVMe wing: two storage backends over DeepSpeed's file operators (https://www.deepspeed.ai/tutorials/deepnvme/).

What it is for:

* ``deepnvme`` reads and writes with ``aio_handle``: libaio and O_DIRECT, through page-locked host memory. It serves
  drives that DeepSpeed's tuner has been run on, and comparisons with DeepNVMe on the same files.
* ``deepnvme-gds`` reads and writes with ``gds_handle``: cuFile, straight into GPU memory. CUDA targets only.

What it costs:

* DeepSpeed ships its operators as C++ source. They are compiled once per machine, which takes minutes and needs a
  compiler, ninja and the libaio headers (``monai-gds doctor --build deepnvme`` does it ahead of the first use).
* Both bypass the page cache: every epoch reads from the drive again.
* Both operators report success whatever happened, and end the process on many errors. Whatever they move is verified,
  and ``gds_handle`` runs in a separate process.

Nothing outside the storage package imports any of it.
"""

from monai_gds.storage.deepnvme.settings import Settings

__all__ = ["Settings"]
