/* A stand-in for libxnvme: the functions that monai_gds uses, with xNVMe 0.7.5's ABI, over pread.
 *
 * Compiled by the test suite (see libraries.py):
 *   cc -shared -fPIC -o libxnvme.so xnvme_double.c              options as in 0.7.5
 *   cc -DNEXT …                                                as on xNVMe's development branch
 *   cc -DCUDA … libcudart.so.N                                 mem=gpu gives buffers from cudaMalloc
 *
 * It does as the library does where that bites: contexts keep the status of their last use, a short read completes with
 * status 0 and the bytes it got, a full queue refuses, set_defaults asks for writing, O_DIRECT is given up in silence.
 * And it fails on demand: double_fail() sets one of the faults below.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef CUDA /* declared here, so that no CUDA headers are needed; the library is the one that torch has loaded */
extern int cudaMalloc(void **, size_t), cudaFree(void *), cudaStreamSynchronize(void *);
extern int cudaStreamCreateWithFlags(void **, unsigned), cudaMemcpyAsync(void *, const void *, size_t, int, void *);
enum { cudaMemcpyHostToDevice = 1, cudaStreamNonBlocking = 1 };
static void *copies; /* a drive that writes to GPU memory does not wait for what is queued there */
#endif

struct opts {
	const char *be, *dev, *mem, *sync, *async, *admin;
	uint32_t nsid;
	uint8_t rdonly, wronly, rdwr, create, truncate, direct;
	uint32_t create_mode;
	uint8_t poll_io, poll_sq, register_files, register_buffers;
	uint32_t css[2], use_cmb_sqs, shm_id, main_core;
	const char *core_mask;
#ifdef NEXT
	const char *iova_mode;
#endif
	const char *adrfam, *subnqn, *hostnqn;
	uint32_t admin_timeout, command_timeout, spdk_fabrics, keep_alive_timeout_ms;
#ifdef NEXT
	size_t host_heap_size, device_heap_size;
	uint32_t gpu_id;
#endif
};

struct geo {
	uint32_t type, npugrp, npunit, nzone;
	uint64_t nsect;
	uint32_t nbytes, nbytes_oob;
	uint64_t tbytes, ssw;
	uint32_t mdts_nbytes, lba_nbytes;
	uint8_t rest[8];
};

struct queue;
struct ctx;
typedef void (*callback)(struct ctx *, void *);

struct ctx {
	uint8_t cmd[64];
	uint64_t result;
	uint16_t ids[3], status;
	void *dev;
	struct queue *queue;
	callback cb;
	void *cb_arg;
	uint32_t opts;
	uint8_t be_rsvd[12];
};
_Static_assert(sizeof(struct ctx) == 128, "as in libxnvme_cmd.h");
_Static_assert(sizeof(struct geo) == 64, "as in libxnvme_geo.h");

struct dev {
	int fd;
	int gpu;
	int is_nvme; /* passthrough: no length in the result */
	struct geo geo;
};

struct slot {
	struct ctx *ctx;
	void *buf;
	uint64_t at;
	size_t nbytes;
};

struct queue {
	struct dev *dev;
	uint32_t capacity, outstanding, nfree;
	struct slot *pending;
	struct ctx **free, *pool;
};

/* Faults. Each is used up as it strikes, unless it says otherwise. */
enum fault {
	NONE,
	SHORT_READ,     /* the value-th read gives half of its bytes, status 0 */
	BAD_STATUS,     /* the value-th read ends with an NVMe status: media error */
	ERRNO_STATUS,   /* the value-th read ends with errno EIO as the kernel's interfaces report it */
	FULL_AGAIN,     /* so many submissions are refused with -EAGAIN */
	FULL_BUSY,      /* so many submissions are refused with -EBUSY */
	REVERSE,        /* completions in reverse order, lasting */
	NO_MEMORY,      /* allocations give NULL, lasting */
	WRITABLE,       /* opens for writing whatever it was asked, lasting */
	BUFFERED,       /* drops O_DIRECT, lasting */
	NO_GEOMETRY,    /* as for a partition, lasting */
	NO_IO_URING,    /* queue_init fails with -EPERM for io_uring, lasting */
	BROKEN_QUEUE,   /* poke fails with -EBADF, lasting */
	REFUSED,        /* the next submission fails with -EINVAL */
	STUCK,          /* nothing completes, lasting */
	LOSES,          /* the next command never completes */
	UNOPENED,       /* devices do not open, for the errno value, lasting */
	HEAP,           /* a heap that holds so many buffers, lasting */
};
static enum fault fault;
static long value;
/* reads, alive buffers, writes, open devices, most in flight, largest read, gpu_id, queues, nsid, heap in MiB,
 * shm_id */
static long counts[11];

void double_fail(int what, long n) { fault = what; value = n; }
long double_count(int which) { return counts[which]; }
void double_reset(void) { memset(counts, 0, sizeof counts); fault = NONE; }

#ifdef NEXT
static struct attr { const char *name, *descr; uint32_t caps; uint8_t rest[4]; } drivers[] = {
	{"upcie", "", 1 << 5 | 1 << 8, {0}}, /* several processes may have a drive */
	{"libvfn", "", 1 << 5, {0}},
	{"io_uring_bdev", "", 1 << 2, {0}},
	{"io_uring", "", 1 << 1, {0}},
	{"thrpool_bdev", "", 1 << 2, {0}},
};
struct attr *xnvme_be_attr_get(int index)
{
	return (size_t)index < sizeof drivers / sizeof *drivers ? drivers + index : NULL;
}
#else
int xnvme_be_attr_list_bundled(void *list) { (void)list; return 0; }
#endif

void xnvme_opts_set_defaults(struct opts *o)
{
	o->rdwr = 1;
	o->nsid = 1;
	o->admin_timeout = 60000000;
	o->command_timeout = 30000000;
	o->create_mode = 0600;
}

static struct dev *open_any(const char *path, struct opts *o)
{
	struct dev *dev = calloc(1, sizeof *dev);
	struct stat st;
	int flags = (o->rdonly ? O_RDONLY : 0) | (o->wronly ? O_WRONLY : 0) | (o->rdwr ? O_RDWR : 0);

	if (path[0] != '/') /* a PCI address: the drive that this variable names plays it */
		path = getenv("XNVME_DOUBLE_DRIVE");
	if (fault == UNOPENED)
		errno = value;
	if (!path || fault == UNOPENED) {
		free(dev);
		return NULL;
	}
	if (fault == WRITABLE)
		flags = O_RDWR;
	if (o->direct && fault != BUFFERED)
		flags |= O_DIRECT;
	dev->fd = open(path, flags);
	if (dev->fd < 0 || fstat(dev->fd, &st)) {
		free(dev);
		return NULL;
	}
	dev->gpu = o->mem && !strcmp(o->mem, "gpu");
	dev->is_nvme = (o->async && !strcmp(o->async, "io_uring_cmd")) ||
		       (o->be && !strncmp(o->be, "upcie", 5));
	dev->geo.nbytes = dev->geo.lba_nbytes = 512;
	dev->geo.mdts_nbytes = 256 << 10;
	dev->geo.tbytes = st.st_size;
	if (S_ISBLK(st.st_mode)) {
		int block = 512;
		ioctl(dev->fd, BLKSSZGET, &block);
		ioctl(dev->fd, BLKGETSIZE64, &dev->geo.tbytes);
		dev->geo.nbytes = dev->geo.lba_nbytes = block;
	}
	if (fault == NO_GEOMETRY)
		memset(&dev->geo, 0, sizeof dev->geo);
#ifdef NEXT
	counts[6] = o->gpu_id;
	counts[9] = o->host_heap_size >> 20;
#endif
	counts[8] = o->nsid;
	counts[10] = o->shm_id;
	counts[3]++;
	return dev;
}

void *xnvme_dev_open(const char *path, struct opts *o) { return open_any(path, o); }
void *xnvme_file_open(const char *path, struct opts *o) { return open_any(path, o); }
void xnvme_dev_close(struct dev *dev)
{
	close(dev->fd);
	free(dev);
	counts[3]--;
}
int xnvme_file_close(struct dev *dev) { xnvme_dev_close(dev); return 0; }
struct geo *xnvme_dev_get_geo(struct dev *dev) { return &dev->geo; }
uint32_t xnvme_dev_get_nsid(struct dev *dev) { (void)dev; return 1; }

/* Buffers. */

void *xnvme_buf_virt_alloc(size_t alignment, size_t nbytes)
{
	void *p;
	if (fault == NO_MEMORY || posix_memalign(&p, alignment, nbytes))
		return NULL;
	counts[1]++;
	return p;
}
void xnvme_buf_virt_free(void *p) { counts[1]--; free(p); }

void *xnvme_buf_alloc(struct dev *dev, size_t nbytes)
{
#ifdef CUDA
	if (dev->gpu) {
		void *p = NULL;
		if (fault == NO_MEMORY || cudaMalloc(&p, nbytes))
			return NULL;
		counts[1]++;
		return p;
	}
#endif
	(void)dev;
	if (fault == HEAP && value-- <= 0)
		return NULL;
	return xnvme_buf_virt_alloc(4096, nbytes);
}
void xnvme_buf_free(struct dev *dev, void *p)
{
#ifdef CUDA
	if (dev->gpu) {
		counts[1]--;
		cudaFree(p);
		return;
	}
#endif
	(void)dev;
	xnvme_buf_virt_free(p);
}

/* The file API. */

struct ctx xnvme_file_get_cmd_ctx(struct dev *dev)
{
	struct ctx ctx = {.dev = dev};
	return ctx;
}
static int finish(struct ctx *ctx, ssize_t got, size_t asked)
{
	/* as xNVMe's psync does: a short transfer reports whatever errno is */
	ctx->result = got;
	if (got != (ssize_t)asked) {
		uint8_t sc = errno;
		if (sc) {
			ctx->result = 0;
			ctx->status = sc << 1 | 7 << 9;
			return -sc;
		}
	}
	return 0;
}
int xnvme_file_pread(struct ctx *ctx, void *buf, size_t n, off_t at)
{
	struct dev *dev = ctx->dev;
	counts[0]++;
	if (fault == SHORT_READ && value-- == 0) {
		fault = NONE;
		ctx->result = pread(dev->fd, buf, n / 2, at);
		return 0;
	}
	if ((fault == ERRNO_STATUS || fault == BAD_STATUS) && value-- == 0) {
		fault = NONE;
		errno = EIO;
		return finish(ctx, -1, n);
	}
	return finish(ctx, pread(dev->fd, buf, n, at), n);
}
int xnvme_file_pwrite(struct ctx *ctx, void *buf, size_t n, off_t at)
{
	struct dev *dev = ctx->dev;
	counts[2]++;
	return finish(ctx, pwrite(dev->fd, buf, n, at), n);
}
int xnvme_file_sync(struct dev *dev) { return fsync(dev->fd); }

/* Queues. */

int xnvme_queue_init(struct dev *dev, uint16_t capacity, int options, struct queue **out)
{
	struct queue *q;
	(void)options;
	if (fault == NO_IO_URING && counts[7]++ == 0)
		return -EPERM;
	if (!capacity || (capacity & (capacity - 1)) || capacity >= 4096)
		return -EINVAL;
	q = calloc(1, sizeof *q);
	q->dev = dev;
	q->capacity = capacity;
	q->pending = calloc(capacity, sizeof *q->pending);
	q->pool = calloc(capacity + 1, sizeof *q->pool);
	q->free = calloc(capacity + 1, sizeof *q->free);
	for (uint32_t i = 0; i <= capacity; i++) {
		q->pool[i].dev = dev;
		q->pool[i].queue = q;
		q->free[q->nfree++] = &q->pool[i];
	}
	*out = q;
	return 0;
}
int xnvme_queue_term(struct queue *q)
{
	free(q->pending);
	free(q->pool);
	free(q->free);
	free(q);
	return 0;
}
int xnvme_queue_set_cb(struct queue *q, callback cb, void *arg)
{
	for (uint32_t i = 0; i <= q->capacity; i++) {
		q->pool[i].cb = cb;
		q->pool[i].cb_arg = arg;
	}
	return 0;
}
uint32_t xnvme_queue_get_outstanding(struct queue *q) { return q->outstanding; }
struct ctx *xnvme_queue_get_cmd_ctx(struct queue *q) { return q->nfree ? q->free[--q->nfree] : NULL; }
int xnvme_queue_put_cmd_ctx(struct queue *q, struct ctx *ctx)
{
	q->free[q->nfree++] = ctx;
	return 0;
}

int xnvme_nvm_read(struct ctx *ctx, uint32_t nsid, uint64_t slba, uint16_t nlb, void *buf, void *meta)
{
	struct queue *q = ctx->queue;
	struct slot *slot;
	(void)nsid;
	(void)meta;
	if (fault == FULL_AGAIN && value-- > 0)
		return -EAGAIN;
	if (fault == FULL_BUSY && value-- > 0)
		return -EBUSY;
	if (fault == REFUSED) {
		fault = NONE;
		return -EINVAL;
	}
	if (q->outstanding == q->capacity)
		return -EBUSY;
	slot = &q->pending[q->outstanding++];
	slot->ctx = ctx;
	slot->buf = buf;
	slot->nbytes = ((size_t)nlb + 1) * q->dev->geo.lba_nbytes;
	slot->at = slba * q->dev->geo.lba_nbytes;
	if (q->outstanding > counts[4])
		counts[4] = q->outstanding;
	if ((long)slot->nbytes > counts[5])
		counts[5] = slot->nbytes;
	return 0;
}

static ssize_t fill(struct dev *dev, void *buf, size_t n, uint64_t at)
{
#ifdef CUDA
	if (dev->gpu) {
		void *host;
		ssize_t got;
		if (posix_memalign(&host, 4096, n))
			return -1;
		got = pread(dev->fd, host, n, at);
		/* a copy from pageable memory may return before it is over */
		if (got > 0 && ((!copies && cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking)) ||
				cudaMemcpyAsync(buf, host, got, cudaMemcpyHostToDevice, copies) || cudaStreamSynchronize(copies)))
			got = -1;
		free(host);
		return got;
	}
#endif
	return pread(dev->fd, buf, n, at);
}

static void complete(struct slot *slot, struct dev *dev)
{
	struct ctx *ctx = slot->ctx;
	size_t n = slot->nbytes;
	ssize_t got;
	int strikes = (fault == SHORT_READ || fault == BAD_STATUS || fault == ERRNO_STATUS) && value-- == 0;

	counts[0]++;
	got = fill(dev, slot->buf, strikes && fault == SHORT_READ ? n / 2 : n, slot->at);
	ctx->result = dev->is_nvme ? 0 : got;
	if (got < 0 || (strikes && fault == ERRNO_STATUS)) {
		ctx->result = 0;
		ctx->status = (strikes ? EIO : errno) << 1 | 7 << 9;
	}
	if (strikes && fault == BAD_STATUS) {
		ctx->result = 0;
		ctx->status = 0x81 << 1 | 2 << 9; /* media error, unrecovered read */
	}
	if (strikes)
		fault = NONE;
}

int xnvme_queue_poke(struct queue *q, uint32_t max)
{
	uint32_t n = q->outstanding;
	(void)max;
	if (fault == BROKEN_QUEUE)
		return -EBADF;
	if (fault == STUCK)
		return 0;
	if (n > 7) /* never all at once, as a drive would */
		n = 7;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t at = fault == REVERSE ? q->outstanding - 1 : 0;
		struct slot slot = q->pending[at];
		complete(&slot, q->dev);
		memmove(&q->pending[at], &q->pending[at + 1], (q->outstanding - at - 1) * sizeof slot);
		q->outstanding--;
		if (fault == LOSES) {
			fault = NONE;
			continue;
		}
		slot.ctx->cb(slot.ctx, slot.ctx->cb_arg);
	}
	return n;
}
