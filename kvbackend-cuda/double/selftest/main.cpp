// The self-test of the double. It prints each test's name and ends with a non-zero code at the first failure.
//
// Build and run, from the folder of the double:
//   d=$(mktemp -d) && f="-std=c++20 -O2 -Wall -Wextra -Werror -fPIC -fvisibility=hidden" &&
//   k="-DKV_DOUBLE -Wno-unknown-pragmas -fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error" &&
//   g++ $f $k -c selftest/kernels.cpp -o $d/kernels.o &&
//   g++ $f -c all.cpp -o $d/all.o &&
//   l="-shared -pthread -Wl,-soname,libcuda.so.1,-z,nodelete,-z,defs,--version-script=exports.map" &&
//   g++ $l -o $d/libcuda.so.1 $d/*.o &&
//   g++ -std=c++20 -O1 -Wall -Wextra -Werror selftest/main.cpp selftest/test_*.cpp $d/libcuda.so.1 -o $d/selftest &&
//   LD_LIBRARY_PATH=$d $d/selftest
#include <chrono>
#include <cstring>

#include "test.hpp"

int main(int count, char** words) {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    OK(cuInit(0));
    for (const Test& test : Test::all()) {
        if (count > 1 && std::strstr(test.name, words[1]) == nullptr) continue;
        std::printf("%s ... ", test.name);
        const auto start = std::chrono::steady_clock::now();
        test.run();
        const auto time = std::chrono::steady_clock::now() - start;
        std::printf("ok (%.1f ms)\n", std::chrono::duration<double, std::milli>(time).count());
    }
    std::printf("all tests passed\n");
}
