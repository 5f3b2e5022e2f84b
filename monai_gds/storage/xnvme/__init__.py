"""The xNVMe wing: two storage backends over libxnvme (https://xnvme.io), one whose commands a CUDA kernel submits, and
the block maps that these need.

What it is for:

* ``xnvme`` reads and writes files through xNVMe's file API, to compare xNVMe with the other backends on the same files.
* ``xnvme-block`` reads the blocks of files straight from their disk, with large commands and a deep queue. It serves
  drives that a user-space driver has taken from the kernel (SPDK, uPCIe), where no file system is mounted, and drives
  that write to GPU memory by themselves. It also reads mounted ext4 and XFS.
* ``xnvme-bam`` reads the same blocks by NVMe commands that a CUDA kernel builds, submits and polls, without the
  processor. No drive gives its queues to such a kernel yet, so a software controller stands in for one.
* A block map (``monai_gds.BlockMap``, ``monai-gds blockmap``) records which blocks the files of a folder occupy, so
  that they can be found where the file system is not mounted.

What it costs:

* libxnvme has to be installed, and reading a disk takes root or the group ``disk``, which may read every file on it.
* ``xnvme-block`` bypasses the page cache and the file system. A wrong idea of where a file lies would yield another
  file's bytes, so the kernel's account of a file is compared before and after each read, and a map that disagrees
  with the file is refused. Only ext4 and XFS directly on a disk, a partition, a loop device or an md RAID0
  can be read.
* More code than any other backend: FIEMAP and sysfs, bindings, drives with their queues and bounce buffers.

Nothing here ever writes to a device.
"""
