// Puts tensors together from decompressed tiles; see device.py.

typedef unsigned char byte;
typedef unsigned short word;
typedef unsigned int dword;
typedef unsigned long long qword;
typedef long long int64;

// What the host passes for each part; see _upload.
struct Part {
    const int* sizes; const int* crcs; const byte* palette; const int* ids; const int64* starts; const byte* streams;
    byte* scratch; byte* out; int64 first, stride, tile_bytes, values, X, Y, Z, tx, ty, tz, gx, gy, gz;
    int64 packed_bytes, value_bytes, shuffled, step, aligned;
};

// For each tile. `stream` and `bytes` go to the CRC-32, the next four to nvCOMP. `source` is the address of the
// decompressed tile, or below 256 the byte that it consists of. A tile without a compressed stream gets a sound one.
struct Columns {
    int64 *stream, *bytes, *address, *squeezed, *out, *out_bytes, *source;
    __device__ Columns(int64* all, int64 n) :
        stream(all), bytes(all + n), address(all + 2 * n), squeezed(all + 3 * n), out(all + 4 * n),
        out_bytes(all + 5 * n), source(all + 6 * n) {}
};

__device__ const Part& part_of(const Part* parts, int64 count, int64 i)
{
    int64 p = count - 1;
    while (parts[p].first > i) p--;
    return parts[p];
}

extern "C" __global__ void prepare(
    const Part* parts, int64 count, int64 total, int64* all, int64 sound, int64 sound_bytes)
{
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i >= total) return;
    const Part& part = part_of(parts, count, i);
    const Columns to(all, total);
    const int64 k = i - part.first, size = part.sizes[part.ids ? part.ids[k] : k];
    const int64 stream = (int64)part.streams + (size > 0 ? part.starts[k] : 0);
    const bool compressed = size > 0 && size < part.tile_bytes;
    to.stream[i] = stream;
    to.bytes[i] = size > 0 ? size : 0;
    to.address[i] = compressed ? stream : sound;
    to.squeezed[i] = compressed ? size : sound_bytes;
    to.out[i] = (int64)part.scratch + k * part.stride;
    to.out_bytes[i] = part.tile_bytes;
    to.source[i] = compressed ? to.out[i] : size > 0 ? stream : -size;
}

extern "C" __global__ void check(
    const Part* parts, int64 count, int64 total, int64* all, int64 sound, int64 sound_bytes, const int* crcs,
    int* failed)
{
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i >= total) return;
    const Part& part = part_of(parts, count, i);
    const int64 k = i - part.first;
    if (crcs[i] == part.crcs[part.ids ? part.ids[k] : k]) return;
    const Columns to(all, total);
    to.address[i] = sound;
    to.squeezed[i] = sound_bytes;
    *failed = 1;
}

// Streams and scratch memory are aligned to 16 bytes, and no more.
template <int STEP, typename T> struct __align__(STEP * sizeof(T) < 16 ? STEP * sizeof(T) : 16) Several { T v[STEP]; };

template <typename packed, typename value, bool PALETTE, int STEP>
__device__ void fill(const Part& part, int64 tile, int64 source, int* failed)
{
    const byte* bytes = (const byte*)source;
    const value* palette = (const value*)part.palette;
    const int row = part.tz, column = part.ty, count = part.tx * part.ty * part.tz;
    const int64 X = part.X, Y = part.Y, Z = part.Z, values = part.values;
    const int64 z0 = tile % part.gz * part.tz; tile /= part.gz;
    const int64 y0 = tile % part.gy * part.ty; tile /= part.gy;
    const int64 x0 = tile % part.gx * part.tx;
    value* out = (value*)part.out + tile / part.gx * X * Y * Z;
    const bool shuffled = part.shuffled, aligned = part.aligned;
    packed constant = 0;
    for (int b = 0; b < sizeof(packed); b++) constant |= (packed)((packed)(source & 255) << (8 * b));
    for (int e = threadIdx.x * STEP; e < count; e += blockDim.x * STEP) {
        const int z = e % row, y = e / row % column, x = e / row / column;
        const int64 left = Z - z0 - z;
        if (x0 + x >= X || y0 + y >= Y || left <= 0) continue;
        Several<STEP, packed> p;
        if (source < 256) for (int s = 0; s < STEP; s++) p.v[s] = constant;
        else if (!shuffled) p = *(const Several<STEP, packed>*)((const packed*)bytes + e);
        else {
            for (int s = 0; s < STEP; s++) p.v[s] = 0;
            for (int b = 0; b < sizeof(packed); b++) {
                const Several<STEP, byte> plane = *(const Several<STEP, byte>*)(bytes + (int64)b * count + e);
                for (int s = 0; s < STEP; s++) p.v[s] |= (packed)((packed)plane.v[s] << (8 * b));
            }
        }
        Several<STEP, value> v;
        for (int s = 0; s < STEP; s++) {
            if (!PALETTE) v.v[s] = p.v[s];
            else if (p.v[s] < values) v.v[s] = palette[p.v[s]];
            else { v.v[s] = 0; if (s < left) *failed = 1; }
        }
        value* to = out + ((x0 + x) * Y + y0 + y) * Z + z0 + z;
        if (aligned && left >= STEP) *(Several<STEP, value>*)to = v;
        else for (int s = 0; s < STEP && s < left; s++) to[s] = v.v[s];
    }
}

template <typename packed, typename value, bool PALETTE>
__device__ void fill(const Part& part, int64 tile, int64 source, int* failed)
{
    if (part.step == 4) fill<packed, value, PALETTE, 4>(part, tile, source, failed);
    else fill<packed, value, PALETTE, 1>(part, tile, source, failed);
}

extern "C" __global__ void place(
    const Part* parts, int64 count, int64 total, int64* all, const int* statuses, const int64* got, int* failed)
{
    const int64 i = blockIdx.x;
    const Part part = part_of(parts, count, i);
    const Columns of(all, total);
    const int64 source = of.source[i], k = i - part.first, tile = part.ids ? part.ids[k] : k;
    if (threadIdx.x == 0 && source == of.out[i] && (statuses[i] || got[i] != part.tile_bytes)) *failed = 1;
    switch (part.values ? 16 * part.packed_bytes + part.value_bytes : part.value_bytes) {
        case 1: return fill<byte, byte, false>(part, tile, source, failed);
        case 2: return fill<word, word, false>(part, tile, source, failed);
        case 4: return fill<dword, dword, false>(part, tile, source, failed);
        case 8: return fill<qword, qword, false>(part, tile, source, failed);
        case 16 + 2: return fill<byte, word, true>(part, tile, source, failed);
        case 16 + 4: return fill<byte, dword, true>(part, tile, source, failed);
        case 16 + 8: return fill<byte, qword, true>(part, tile, source, failed);
        case 32 + 4: return fill<word, dword, true>(part, tile, source, failed);
        case 32 + 8: return fill<word, qword, true>(part, tile, source, failed);
        default: *failed = 1;
    }
}
