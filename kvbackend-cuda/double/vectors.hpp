// CUDA's vector types, with the device's alignment, and their make functions.
#pragma once

struct alignas(4) uchar4 {
    unsigned char x, y, z, w;
};
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) { return {x, y, z, w}; }

struct alignas(8) short4 {
    short x, y, z, w;
};
inline short4 make_short4(short x, short y, short z, short w) { return {x, y, z, w}; }

struct alignas(4) ushort2 {
    unsigned short x, y;
};
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }

struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}

struct alignas(8) int2 {
    int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }

struct alignas(16) int4 {
    int x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

struct alignas(8) uint2 {
    unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

struct alignas(4) uint3 {
    unsigned x, y, z;
};
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct alignas(8) float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

struct alignas(4) float3 {
    float x, y, z;
};
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct alignas(16) longlong2 {
    long long x, y;
};
inline longlong2 make_longlong2(long long x, long long y) { return {x, y}; }

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
