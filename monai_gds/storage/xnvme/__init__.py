"""The xNVMe wing: backends over libxnvme (https://xnvme.io), and one whose commands a CUDA kernel submits.

* ``xnvme`` reads and writes files through xNVMe's file API, to compare xNVMe with the other backends on the same files.
* ``xnvme-block`` reads the blocks of files straight from their disk, with large commands and a deep queue. It serves
  drives that a user-space driver has taken from the kernel, where no file system is mounted, and drives that write to
  GPU memory by themselves. A wrong idea of where a file lies would yield another file's bytes, so the kernel's account
  of a file is compared before and after each read, and a block map that disagrees with the file is refused.
* ``xnvme-bam`` reads the same blocks by NVMe commands that a CUDA kernel builds, submits and polls, without the
  processor. No drive gives its queues to such a kernel yet, so a software controller stands in for one.

Nothing here ever writes to a device.
"""
