// CUDA's vector types, with the device's alignment, and their make functions.
#pragma once

#define KV_VECTOR2(name, element, alignment) \
    struct alignas(alignment) name {         \
        element x, y;                        \
    };                                       \
    inline name make_##name(element x, element y) { return {x, y}; }

#define KV_VECTOR3(name, element, alignment) \
    struct alignas(alignment) name {         \
        element x, y, z;                     \
    };                                       \
    inline name make_##name(element x, element y, element z) { return {x, y, z}; }

#define KV_VECTOR4(name, element, alignment) \
    struct alignas(alignment) name {         \
        element x, y, z, w;                  \
    };                                       \
    inline name make_##name(element x, element y, element z, element w) { return {x, y, z, w}; }

KV_VECTOR4(uchar4, unsigned char, 4)
KV_VECTOR4(short4, short, 8)
KV_VECTOR2(ushort2, unsigned short, 4)
KV_VECTOR4(ushort4, unsigned short, 8)
KV_VECTOR2(int2, int, 8)
KV_VECTOR4(int4, int, 16)
KV_VECTOR2(uint2, unsigned, 8)
KV_VECTOR3(uint3, unsigned, 4)
KV_VECTOR4(uint4, unsigned, 16)
KV_VECTOR2(float2, float, 8)
KV_VECTOR3(float3, float, 4)
KV_VECTOR4(float4, float, 16)
KV_VECTOR2(longlong2, long long, 16)
KV_VECTOR2(ulonglong2, unsigned long long, 16)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
