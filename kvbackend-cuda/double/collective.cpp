// The results of a warp's collectives: shuffles, ballots, and matrix instructions, with fragments laid out as
// in PTX.
#include <cstring>

#include "block.hpp"
#include "elements.hpp"

namespace kvdouble {

namespace {

void shuffle(Request* const (&requests)[32], unsigned mask) {
    for (unsigned l = 0; l < 32; l++) {
        if ((mask >> l & 1) == 0) continue;
        const unsigned source = requests[l]->source;
        if (source > 31 || (mask >> source & 1) == 0) {
            raise_fault(CUDA_ERROR_LAUNCH_FAILED, "a shuffle reads from a lane outside its mask");
        }
        requests[l]->result = requests[source]->value;
    }
}

void ballot(Request* const (&requests)[32], unsigned mask) {
    uint64_t votes = 0;
    for (unsigned l = 0; l < 32; l++) {
        if ((mask >> l & 1) != 0 && requests[l]->value != 0) votes |= uint64_t{1} << l;
    }
    for (unsigned l = 0; l < 32; l++) {
        if (mask >> l & 1) requests[l]->result = votes;
    }
}

// Lane l passes row l % 8 of matrix l / 8, and receives two neighbouring elements of each matrix.
void load_matrices(Request* const (&requests)[32], const Group& group) {
    const int variant = requests[0]->variant;
    const bool transposed = variant < 0;
    const auto count = static_cast<unsigned>(transposed ? -variant : variant);
    for (unsigned m = 0; m < count; m++) {
        uint16_t matrix[8][8];
        for (unsigned r = 0; r < 8; r++) {
            const auto* row = static_cast<const unsigned char*>(requests[m * 8 + r]->row);
            if (row < group.shared || row + 16 > group.shared + group.shared_bytes) {
                raise_fault(CUDA_ERROR_INVALID_ADDRESS_SPACE, "ldmatrix reads outside shared memory", row);
            }
            if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
                raise_fault(CUDA_ERROR_MISALIGNED_ADDRESS, "ldmatrix with a row that is no multiple of 16", row);
            }
            std::memcpy(matrix[r], row, 16);
        }
        for (unsigned l = 0; l < 32; l++) {
            const unsigned row = l / 4, column = l % 4 * 2;
            const uint32_t low = transposed ? matrix[column][row] : matrix[row][column];
            const uint32_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
            requests[l]->matrices[m] = low | high << 16;
        }
    }
}

// Adds the product of a 16x16 and a 16x8 matrix. The sums are precise enough that only the result is rounded.
void multiply(Request* const (&requests)[32], bool bf16) {
    float left[16][16], right[16][8];
    for (unsigned l = 0; l < 32; l++) {
        const unsigned group = l / 4, column = l % 4 * 2;
        for (unsigned i = 0; i < 4; i++) {
            const float2 pair = bf16 ? unpack_bf16x2(requests[l]->left[i]) : unpack_f16x2(requests[l]->left[i]);
            const unsigned row = group + i % 2 * 8, at = column + i / 2 * 8;
            left[row][at] = pair.x;
            left[row][at + 1] = pair.y;
        }
        for (unsigned i = 0; i < 2; i++) {
            const float2 pair = bf16 ? unpack_bf16x2(requests[l]->right[i]) : unpack_f16x2(requests[l]->right[i]);
            right[column + i * 8][group] = pair.x;
            right[column + i * 8 + 1][group] = pair.y;
        }
    }
    double sums[16][8] = {};
    for (unsigned r = 0; r < 16; r++) {
        for (unsigned k = 0; k < 16; k++) {
            const double x = left[r][k];
            for (unsigned c = 0; c < 8; c++) sums[r][c] += x * static_cast<double>(right[k][c]);
        }
    }
    for (unsigned l = 0; l < 32; l++) {
        const unsigned group = l / 4, column = l % 4 * 2;
        for (unsigned i = 0; i < 4; i++) {
            float& sum = requests[l]->sum[i];
            sum = static_cast<float>(static_cast<double>(sum) + sums[group + i / 2 * 8][column + i % 2]);
        }
    }
}

}  // namespace

void compute_collective(Request* const (&requests)[32], unsigned mask, const Group& group) {
    switch (requests[__builtin_ctz(mask)]->kind) {
        case Collective::sync: return;
        case Collective::shuffle: return shuffle(requests, mask);
        case Collective::ballot: return ballot(requests, mask);
        case Collective::load_matrices: return load_matrices(requests, group);
        case Collective::multiply_bf16: return multiply(requests, true);
        case Collective::multiply_f16: return multiply(requests, false);
    }
}

}  // namespace kvdouble
