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
  and ``gds_handle`` runs in a process of its own.

How it is laid out, bottom up; nothing outside the storage package imports any of it:

* ``settings``: the settings of a handle, by DeepSpeed's names.
* ``build``: compiles and loads the operators, with ``results.h`` compiled in.
* ``lanes``: one engine and one buffer per thread.
* ``verified``: the base of both backends. It asks an engine only for what it can do, and verifies that it did it.
* ``aio``: the backend ``deepnvme``.
* ``gds``: the backend ``deepnvme-gds``, and ``gds_helper``, the process in which ``gds_handle`` runs.
"""

from monai_gds.storage.deepnvme.settings import Settings

__all__ = ["Settings"]
