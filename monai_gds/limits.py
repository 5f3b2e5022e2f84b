"""Sizes and budgets of the running library, with the reason for each: memory, counts, and the sizes of pieces.

Modules read them as ``limits.HEADS_BYTES`` whenever they need one, so a test patches one place. None of them is a
setting: anything that a user may choose is an argument, whose default may be here. Not here are sizes that belong to a
file format or to the kernel's interfaces, time limits, what a backend declares about itself (``group_bytes``,
``open_files``), and the limits of the wings. ``tests/test_limits.py`` checks this.

Units are in the names: ``_BYTES``; ``_ITEMS``, ``_FILES`` and so on are counts.
"""

from __future__ import annotations

# ---------------------------------------------------------------------------------------------------------------------
# Storage: how a read is cut, merged and spread

#: Reads of at most this many bytes in all, into a CPU target, are done by the caller's own thread: handing them to
#: another thread costs more than reading them.
INLINE_BYTES = 512 << 10

#: Small reads in flight where each takes so long that threads mostly wait, as over NFS (``storage/latency.py``): 64 of
#: those that were begun one by one, and 64 for each thread that reads many files by io_uring.
SLOW_READS = 64

#: Records, or images, that are begun ahead then, so that there are such reads to follow. Over 50 ms per open twice as
#: many records came per second with 256 as with 128: while one group of 64 is awaited, others are read.
SLOW_AHEAD = 256

#: Smallest piece that a read is cut into to occupy more threads.
MIN_PIECE_BYTES = 1 << 20

#: Neighbours in a file with at most this many bytes between them are read together.
GAP_BYTES = 64 << 10

#: At least this many reads into a CUDA device, all of them smaller than ``PACK_BYTES``, arrive in one block by one
#: copy, and one kernel takes it apart. A copy and an allocation each cost more than moving so few bytes.
PACK_READS = 8
PACK_BYTES = 1 << 20

#: Reads of a file with at most this many bytes between them share a part of such a block. With wider gaps (the rows of
#: a crop, say) the block would be mostly bytes that nobody requested.
PACK_GAP_BYTES = 64 << 10

#: Reads of fewer bytes are left to the kernel's own read-ahead. Larger pieces are announced to the kernel as a whole.
KERNEL_READ_AHEAD_BYTES = 512 << 10

#: Smaller ranges are read instead of mapped: a mapping costs two system calls and a fault per page.
MAP_BYTES = 64 << 10

#: Mappings up to this size request huge pages. What is not in the page cache is then read 2 MiB at a time: two tensors
#: of 0.6 MB took 0.5 ms instead of 1.4, of 1.5 MB 1.0 instead of 3.3, and of 52 MB 53 instead of 103. From larger
#: volumes a crop would read far more than it needs: from 512³, 100 MB instead of the 40 MB that it reads with the
#: kernel's read-ahead of 128 kB.
HUGE_MAP_BYTES = 64 << 20

#: Files per io_uring call, the size of a thread's ring.
RING_FILES = 64

# Storage: pinned staging

#: Largest piece that a staging slot holds. Measured from the page cache to a GPU: 16 MiB pieces read by 8 threads moved
#: 25 GB/s, 8 MiB pieces 21.
SLOT_BYTES = 16 << 20

#: Largest piece that is copied from a file registered with CUDA, without a slot. Between pieces a thread has to get the
#: interpreter's lock: an H100 received epochs of 2.9 GB, two items at a time, at 50 GB/s in pieces of 64 MiB or more,
#: at 49 in 32 MiB, at 44 in 16 MiB.
REGISTERED_PIECE_BYTES = 64 << 20

#: Slots per process and device: 256 MiB of pinned memory once all are in use.
STAGING_SLOTS = 16

#: Streams for work that follows the copies, such as decompressing. nvCOMP takes about 2 ms for LZ4 however few tiles a
#: call has, so several records are decompressed at once.
SIDE_STREAMS = 8

#: Smaller tensors on a device are fetched whole to be written, without a slot.
STAGED_WRITE_BYTES = 1 << 20

# Storage: KvikIO

#: Threads of KvikIO's if no number was set: five eighths of the cores, and at most this many. The other cores are for
#: Python's own threads (the loader's, the training's, and the pump). Measured on an H100 with 16 cores, records of
#: 74 MB one by one: 14 threads moved 23 GB/s to the consumer, 12 moved 33, 10 moved 43, 8 moved 42.
KVIKIO_THREADS = 16

#: Bytes that one of KvikIO's threads reads at a time. Each task wakes a thread, at the pump's expense.
KVIKIO_TASK_BYTES = 2 << 20

#: Tasks in flight where cuFile moves the bytes: several for each thread.
KVIKIO_TASKS = 64

#: Piece per staging slot where cuFile does not move the bytes. All slots in flight must fit the processor's cache
#: between KvikIO's threads and the copy: measured on an H100 whose host has 300 MiB of it, 8 of 12 MiB in flight moved
#: 35 GB/s, 8 of 8 MiB or 4 of 12 MiB moved 52, which is what the link takes. Fewer and larger pieces leave the loader
#: more of the interpreter's time.
KVIKIO_PIECE_BYTES = 12 << 20

#: Smaller reads are left to the posix backend.
KVIKIO_LEAST_BYTES = 1 << 20

# ---------------------------------------------------------------------------------------------------------------------
# Cache: records

#: Size of the first read of a record, and of one where only the header is wanted. Holds what comes before the large
#: tensors of an item of a few NIfTI images, or the header of such an item.
HEAD_READ_BYTES = 32 << 10
HEADER_READ_BYTES = 16 << 10

#: Pinned memory through which the tables of one record in tiles go to a CUDA device, and how many such pieces a process
#: keeps. Two volumes of 512x512x300 have 82 kB of tables, and a palette up to 256 kB.
TABLES_BYTES = 128 << 10
TABLES_KEPT = 64

#: Bytes of holes that any record may have, such as a sparse copy of a record that is mostly zeros.
HOLES_BYTES = 256 << 20

#: Largest array of text below a data root. A record holds its characters, not its width, which the reader's root sets.
TEXTS_BYTES = 256 << 20

#: Memory budget for parsed record heads; most take a third of what is counted. Once it is full, new heads are not kept:
#: an epoch visits every record exactly once, so evicting one head for another gains nothing.
HEADS_BYTES = 128 << 20

#: What counts of a tensor in a head beside its share of the header: its name, shape, range and checksum.
HEAD_TENSOR_BYTES = 500

#: Records of at most ``TOGETHER_RECORD_BYTES`` are read together, up to this many and up to this many bytes: one copy
#: to the device for all of them costs less than one each.
TOGETHER_RECORD_BYTES = 1 << 20
TOGETHER_RECORDS = 64
TOGETHER_BYTES = 8 << 20

#: Bytes that are checksummed at a time, a multiple of 32 KiB. 2 MiB fit the cache of a core, and smaller pieces would
#: spend more on calls.
CHECKSUM_PIECE_BYTES = 2 << 20

#: Where items come on the CPU and the drive is this machine's, those of up to this size are not saved in the
#: background, since the two threads would take Python's lock from each other: a miss of 64 kB took 0.8 ms instead of
#: 1.0, with transforms of 2 ms 3.1 instead of 3.9.
SAVED_AT_ONCE_BYTES = 64 << 10

#: Bytes of items that may wait to be written. A single item is accepted whatever its size.
QUEUE_BYTES = 256 << 20

#: Items that may wait to be written, however small. Adding up the bytes of so many, for every new item, takes 0.1 ms.
QUEUE_ITEMS = 4096

#: Seconds for which the end of a loop waits for what is still being saved. A script may remove the folder next, which
#: would fail, or leave what is written meanwhile. Small volumes take milliseconds.
SETTLE_SECONDS = 0.5

#: Bytes that are waited for there. More of them, as in a first epoch of large volumes, are saved beside the next epoch.
SETTLE_BYTES = 64 << 20

#: Bytes that are copied at a time from one directory to another.
COPIED_BYTES = 4 << 20

# Cache: tiles

#: Smaller tensors are never cut into tiles: they are read whole in one request.
TILED_BYTES = 1 << 20

#: On a CPU target ``auto`` leaves tensors of up to this size whole, even where crops come first. They are mapped on
#: huge pages (``HUGE_MAP_BYTES``), with few faults. Processor time of four crops from an image and a label, whole and
#: in tiles of lz4, ms: of 192³ float32 (28 MB each) 7 and 20 warm, 17 and 25 cold; of 256³ (64 MiB) 12 and 28 warm, 33
#: and 31 cold; of 320³ (131 MB) 27 and 31 warm, 44 and 34 cold. Where crops follow a label tiles pay at any size, since
#: MONAI need not look for its voxels: of 96³ 73 and 15 warm.
CROPPED_BYTES = 64 << 20

#: Largest tile. 64³ of 8 bytes have 2 MiB.
TILE_BYTES = 4 << 20

#: Tiles are packed in slabs of about this many bytes before compression: few native calls, and little memory beside the
#: tensor.
SLAB_BYTES = 2 << 20

#: The same for unpacking. The tiles of four crops of 96³ are decoded by one call, and each crop is filled in one go:
#: with 2 MiB that took 15 % longer.
DECODED_BYTES = 8 << 20

#: What a record's head holds of the runs of a label: how many elements of each value are in each block, of 4 bytes
#: each. Larger tables would have smaller blocks. For 956,000 runs of 105 values the blocks have 10 kB.
RUN_COUNTS_BYTES = 32 << 10

#: Voxels of a box that are filled at a time, through memory that fits a core's cache: an index takes eight bytes to be
#: looked up. With half as many, the calls for four crops of 96³ from an image and a label took 0.7 ms more.
FILL_VOXELS = 1 << 18

#: Memory for parts of tensors in tiles that is kept for the next items: those of four crops of 96³ from an image and a
#: label of 512 x 512 x 300 float32 span 70 to 200 MB each, since they keep the strides of the whole volume. Block sizes
#: are powers of two. Memory that was given back costs a fault per page when it is taken again: 0.19 s in some items.
VOLUME_POOL_BYTES = 1 << 30

#: The same for compressed tiles, and for what is needed while they are unpacked: about 25 MB for each item at a time.
SCRATCH_POOL_BYTES = 64 << 20

# Cache: keys and sources

#: Items whose hash is remembered, at most about 24 MB. Hashing an item again costs 40 us.
HASHED_ITEMS = 40_000

#: Keys that are remembered, those that were used last: at most about 5 MB. Making a key again costs 8 us.
KEYED_ITEMS = 10_000

#: Items per process whose first keys are kept, to notice one that gets record after record: at most 5 MB, and nearly
#: nothing where all items hit. Mostly all items name what the run writes, so the first ones show it.
REPEATED_ITEMS = 4096

#: How many hashes of sources a process remembers, at about 200 bytes each, before it leaves out those of the files in a
#: source folder, and keeps that of the folder. When such a folder changes, all that is in it is read again.
KNOWN_FILES = 1_000_000

#: Source files remembered by the state in which this process first saw them, at most about 200 MB.
YOUNG_FILES = 1_000_000

#: A source folder with more entries counts by its name only. Listing that many takes half a second, at every access.
FOLDER_ENTRIES = 200_000

#: If an item reads more files of one folder without naming them, the folder counts in their place: a zarr of 5,000
#: chunks would otherwise be a list of 5,000 paths. The second number is for a folder that was listed, which counts
#: anyway.
READ_FILES = 256
READ_LISTED_FILES = 32

#: The newest lists of files per item that are compared: one per version of the data.
READ_LISTS = 8

#: Files per pipeline that count for later items, since an earlier one read them and no item names them. Each costs a
#: call per hit.
KEPT_READS = 256

#: Size of one read of a source file. 512 KiB are still in the processor's cache when they are hashed.
SOURCE_PIECE_BYTES = 512 << 10

# Cache: what is remembered in files, for other processes

#: Hashes of sources that may wait to be written, however recent the last write: a killed process loses no more.
MEMO_WAITING_ITEMS = 256

#: How many files of notes of one kind, left by ended processes, there may be before they are merged into one.
NOTE_FILES = 16

#: Size from which such a file is not merged: that would only copy it.
NOTE_UNMERGED_BYTES = 16 << 20

#: Size of all such files together: 7 million hashes of sources, or 1.5 million records. Beyond that the oldest files
#: are removed.
NOTE_BYTES = 512 << 20

# Cache: the budget of a directory

#: After looking at a directory, a process takes one of this many parts of the room that is left, and at most this many
#: bytes, before it looks again: each process may exceed the budget by as much. It also makes room for as much at a
#: time. Looking at 100,000 records took 2 s, on two busy cores.
BUDGET_PARTS = 64
BUDGET_PART_BYTES = 1 << 30

# Cache: filling

#: Workers that fill a cache by default, if there are as many cores. Each holds an item and its transforms' results in
#: memory: 1 to 3 GB for volumes of 512 x 512 x 300.
POPULATE_WORKERS = 8

# Programs

#: Largest tensor that a program holds, and all of its tensors together. They cross from a worker process to the one
#: that replays. Larger ones are made by the replay, or the transform runs there as a whole.
CONSTANT_BYTES = 64 << 10
CONSTANTS_BYTES = 1 << 20

#: Operations of a program: some 200 bytes each. MONAI's longest pipelines have a thousand. A transform with more, such
#: as one that loops over slices, runs on the voxels.
PROGRAM_OPERATIONS = 10_000

#: Operations whose result's form a recording process remembers.
FORMS_REMEMBERED = 4096

#: Largest tensor that a transform reads and that the target computes, such as a matrix: a worker waits for it.
ASKED_BYTES = 4 << 10

# ---------------------------------------------------------------------------------------------------------------------
# Loader

#: Batches that wait for the consumer, each in the device's memory.
BATCHES_WAITING = 2

#: Batches of the next epoch whose items are made during the last steps of an epoch: those that may wait, and one more.
BATCHES_AHEAD = 3

#: Batches whose metadata is kept after the consumer took them, if the loader's thread is never at rest.
METADATA_KEPT = 4

#: Forms of transforms that are compared with an eager run, in one process and for one pipeline. A transform that never
#: does the same twice would be run twice for ever.
CHECKED_FORMS = 64

#: Times running that a transform cannot be recorded until it is not tried again, and times that it draws from
#: generators of the whole process until it is named.
REFUSALS = 4

#: Bools of voxels whose last values are kept for one pipeline as guesses, which go to a worker with each item.
GUESSES = 256

#: Default bound of the records in flight, unless three batches are more. Measured on an H100 with 74 MB records, see
#: the README.
PREFETCH_RECORDS = 8

#: Default bound of the bytes of records in flight.
PREFETCH_BYTES = 1 << 30

#: On their way to a GPU it is this part of the GPU's memory, and at most this many bytes, if that is more. Two records
#: of 576 MB did not fit into 1 GiB, so the copies had gaps: an H100 received epochs of them at 30 GB/s, at 38 with
#: 2 GiB, and no faster with 4. Registered files (``pinned_bytes``): 43, 52.5, 52.3; a pinned copy 52 to 55.
PREFETCH_PART_OF_DEVICE = 16
PREFETCH_DEVICE_BYTES = 2 << 30

#: Draws from torch's generator between two epochs of a loader that are recognised: a few loaders of validations.
DRAWS_BETWEEN_EPOCHS = 8

#: Smaller arrays and tensors of a batch from a worker are pickled with it. Each larger one costs some 10 us.
PICKLED_BUFFER_BYTES = 16 << 10

#: Batches of this many bytes, a huge page, are stacked in pooled memory. The kernel zeroes fresh memory by the page.
POOLED_BATCH_BYTES = 2 << 20

#: Memory that the pool keeps for the next batches when nothing uses it.
POOL_BYTES = 32 << 20

# ---------------------------------------------------------------------------------------------------------------------
# Images

#: Batches whose reads are under way while one is used.
READ_AHEAD_BATCHES = 4

#: Batches that DALI works on ahead of the consumer; its default.
DALI_PREFETCH_BATCHES = 2

#: Host buffers for batches that are kept for reuse.
IMAGE_BUFFERS = 8

#: Bytes of images per packed file, some 300 of ImageNet's. Large enough to be read in several pieces at once, and small
#: enough that a window of eight files, and as many read ahead, fit into memory.
PACKED_FILE_BYTES = 32 << 20

#: Forms of pieces of programs that have a function of TorchScript on each device; one of eleven transforms had eleven.
#: Others run step by step.
SCRIPTED_FORMS = 500
