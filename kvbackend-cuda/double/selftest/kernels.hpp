// The arguments of the self-test's kernels.
#pragma once

#include <cstdint>

struct PlacesArgs {
    unsigned* out;
};
struct VectorArgs {
    float* out;
    const float* in;
    unsigned count;
    float value;
    int mode;
};
struct MultiplyArgs {
    float* sums;
    const uint16_t* left;
    const uint16_t* right;
    bool bf16;
    bool right_by_rows;
};
