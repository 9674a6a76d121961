// The few NCCL entry points that the backend calls, between the double's devices. A link makes the library
// available under NCCL's name.
//
// The double is stricter than NCCL: all handles are non-blocking, and a call's work is on the stream only
// after the state was queried a few times, so a rank that does not query it gets the wrong order. If ranks
// call different collectives, all of them get an error. Destroying a handle waits for all ranks of its group,
// as NCCL may do. Not modelled: channels, networks, reductions with factors, captures.
#include "nccl.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "call.hpp"
#include "elements.hpp"
#include "memory.hpp"
#include "queue.hpp"

using namespace kvdouble;

namespace {

constexpr unsigned questions_until_issued = 3;

struct Ranks {
    std::map<NcclComm*, std::shared_ptr<NcclComm>> live;
    std::map<std::array<char, 128>, std::shared_ptr<NcclGroup>> groups;
    uint64_t ids = 0;
};
Ranks& ranks() {
    static auto* all = new Ranks;
    return *all;
}

thread_local std::string last_warning;

NcclResult warn(NcclResult code, const std::string& text) {
    last_warning = "test double: " + text;
    return code;
}

// Marks a group as failed for all of its ranks.
void fail(NcclGroup& group, NcclResult code, const std::string& reason) {
    if (group.error == NCCL_SUCCESS) {
        group.error = code;
        group.reason = reason;
    }
    state().progress.notify_all();
}

std::shared_ptr<NcclComm> find(NcclComm* handle) {
    const auto at = ranks().live.find(handle);
    return at == ranks().live.end() ? nullptr : at->second;
}

// --- This thread's calls between ncclGroupStart and ncclGroupEnd.

struct Transfer {
    bool sends;
    int peer;
    Piece piece;
};
struct Asked {
    std::shared_ptr<NcclComm> comm;
    std::shared_ptr<Stream> stream;
    std::vector<Transfer> transfers;
};
struct Opened {
    int depth = 0;
    NcclResult error = NCCL_SUCCESS;
    std::vector<std::pair<NcclComm**, NcclComm*>> joins;  // Handles that the end of the group gives out.
    std::vector<Asked> asked;
};
thread_local Opened opened;

// --- Work on the stream's worker.

bool stopped(const NcclComm& comm) {
    return comm.aborted || comm.device->error != CUDA_SUCCESS || comm.group->error != NCCL_SUCCESS;
}

bool readable(const Device& device, uintptr_t at, size_t bytes) {
    return bytes == 0 || usable(device, at, bytes) || find_place(at, bytes).kind == Place::Kind::pinned;
}

// Runs a piece of host code that may fault.
template <typename Body>
Fault careful(Body body) {
    return guarded([](void* argument) { (*static_cast<Body*>(argument))(); }, &body);
}

// Checks a rank's memory when its work starts.
Fault memory_of(const NcclComm& comm, const Piece& piece, size_t from_bytes, size_t to_bytes, const std::string& call) {
    for (const auto& [at, bytes] : {std::pair{piece.from, from_bytes}, std::pair{piece.to, to_bytes}}) {
        if (!readable(*comm.device, at, bytes)) {
            return {CUDA_ERROR_ILLEGAL_ADDRESS, call + ": it is not live memory", reinterpret_cast<void*>(at), false};
        }
    }
    return {};
}

// Waits until all ranks have made the same call. The last rank to arrive does the work for all ranks.
template <typename Work>
Fault meet(const std::shared_ptr<NcclComm>& comm, uint64_t number, const std::string& call, const Piece& piece,
           std::pair<size_t, size_t> bytes, Work work) {
    std::unique_lock lock(state().lock);
    NcclGroup& group = *comm->group;
    const auto finish = [&](Fault fault) {
        comm->outstanding--;
        if (fault.code != CUDA_SUCCESS) fail(group, NCCL_REMOTE_ERROR, "the device of rank " + std::to_string(comm->rank));
        return fault;
    };
    if (stopped(*comm)) return finish({});
    if (Fault fault = memory_of(*comm, piece, bytes.first, bytes.second, call); fault.code != CUDA_SUCCESS) {
        return finish(fault);
    }
    auto& meeting = group.meetings[number];
    if (meeting == nullptr) {
        meeting = std::make_shared<Meeting>();
        meeting->call = call;
        meeting->pieces.resize(group.ranks.size());
    }
    const auto mine = meeting;
    if (mine->call != call) {
        fail(group, NCCL_INVALID_USAGE, "ranks differ: " + call + " on rank " + std::to_string(comm->rank) +
                                            ", and " + mine->call + " on another");
        return finish({});
    }
    mine->pieces[static_cast<size_t>(comm->rank)] = piece;
    if (++mine->came == group.ranks.size()) {
        group.meetings.erase(number);
        Fault fault = careful([&] { work(mine->pieces); });
        mine->done = true;
        state().progress.notify_all();
        return finish(fault);
    }
    state().progress.wait(lock, [&] { return mine->done || stopped(*comm); });
    if (!mine->done) mine->came = 0;  // Nobody touches the memory of a rank that has aborted.
    return finish({});
}

// Posts the sends, completes the receives, and waits until the other ranks have received all sends.
Fault exchange(const std::shared_ptr<NcclComm>& comm, const std::vector<Transfer>& transfers) {
    std::unique_lock lock(state().lock);
    NcclGroup& group = *comm->group;
    Fault fault;
    std::vector<std::shared_ptr<Mail>> sent;
    std::vector<const Transfer*> missing;
    for (const Transfer& transfer : transfers) {
        if (stopped(*comm)) break;
        const size_t bytes = transfer.piece.bytes;
        const std::string call = transfer.sends ? "ncclSend" : "ncclRecv";
        fault = memory_of(*comm, transfer.piece, transfer.sends ? bytes : 0, transfer.sends ? 0 : bytes, call);
        if (fault.code != CUDA_SUCCESS) {
            fail(group, NCCL_REMOTE_ERROR, "the device of rank " + std::to_string(comm->rank));
        } else if (transfer.sends) {
            sent.push_back(std::make_shared<Mail>(Mail{transfer.piece, false}));
            group.mail[{comm->rank, transfer.peer}].push_back(sent.back());
        } else {
            missing.push_back(&transfer);
        }
    }
    state().progress.notify_all();
    const auto done = [&] {
        std::erase_if(missing, [&](const Transfer* receive) {
            auto& box = group.mail[{receive->peer, comm->rank}];
            if (box.empty()) return false;
            const auto mail = box.front();
            if (mail->piece.bytes != receive->piece.bytes) {
                fail(group, NCCL_INVALID_USAGE,
                     "ranks differ: " + std::to_string(mail->piece.bytes) + " bytes were sent, and " +
                         std::to_string(receive->piece.bytes) + " are received");
                return false;
            }
            box.pop_front();
            const Fault copied = careful([&] {
                std::memcpy(reinterpret_cast<void*>(receive->piece.to), reinterpret_cast<void*>(mail->piece.from),
                            receive->piece.bytes);
            });
            if (fault.code == CUDA_SUCCESS) fault = copied;
            mail->taken = true;
            state().progress.notify_all();
            return true;
        });
        return missing.empty() && std::all_of(sent.begin(), sent.end(), [](const auto& mail) { return mail->taken; });
    };
    state().progress.wait(lock, [&] { return stopped(*comm) || done(); });
    // No other rank may access the memory of a rank that has aborted.
    for (auto& [way, box] : group.mail) {
        std::erase_if(box, [&](const auto& mail) { return std::find(sent.begin(), sent.end(), mail) != sent.end(); });
    }
    comm->outstanding--;
    return fault;
}

// --- Reductions.

template <typename T, typename Widen, typename Narrow>
void reduce(const std::vector<Piece>& pieces, int op, Widen widen, Narrow narrow) {
    const size_t count = pieces[0].bytes / sizeof(T);
    for (size_t i = 0; i < count; i++) {
        const auto at = [&](const Piece& piece) {
            T value;
            std::memcpy(&value, reinterpret_cast<const char*>(piece.from) + i * sizeof(T), sizeof(T));
            return widen(value);
        };
        auto all = at(pieces[0]);
        for (size_t rank = 1; rank < pieces.size(); rank++) {
            const auto next = at(pieces[rank]);
            all = op == NCCL_SUM ? widen(narrow(all + next)) : op == NCCL_MIN ? std::min(all, next) : std::max(all, next);
        }
        const T value = narrow(all);
        for (const Piece& piece : pieces) {
            std::memcpy(reinterpret_cast<char*>(piece.to) + i * sizeof(T), &value, sizeof(T));
        }
    }
}

void reduce_all(const std::vector<Piece>& pieces, int type, int op) {
    const auto same = [](float x) { return x; };
    const auto whole = [](int8_t x) { return static_cast<int>(x); };
    switch (type) {
        case NCCL_FLOAT32: return reduce<float>(pieces, op, same, same);
        case NCCL_FLOAT16: return reduce<uint16_t>(pieces, op, f16_to_f32, f32_to_f16);
        case NCCL_BFLOAT16: return reduce<uint16_t>(pieces, op, bf16_to_f32, f32_to_bf16);
        default: return reduce<int8_t>(pieces, op, whole, [](int x) { return static_cast<int8_t>(x); });
    }
}

// --- Checks of the entry points.

size_t bytes_of(int type) {
    switch (type) {
        case NCCL_INT8:
        case NCCL_UINT8: return 1;
        case NCCL_FLOAT16:
        case NCCL_BFLOAT16: return 2;
        case NCCL_FLOAT32: return 4;
        default: return 0;
    }
}

bool one_of_memory(const Device& device, const void* pointer, size_t bytes) {
    const Place place = find_place(reinterpret_cast<uintptr_t>(pointer), std::max<size_t>(bytes, 1));
    return place.kind == Place::Kind::pinned || (place.kind == Place::Kind::device && place.device == &device);
}

// Finds the handle and the stream of a collective, and checks that it may be called now.
NcclResult enter(NcclComm* handle, CUstream stream_handle, std::shared_ptr<NcclComm>& comm,
                 std::shared_ptr<Stream>& stream) {
    comm = find(handle);
    if (comm == nullptr) return warn(NCCL_INVALID_ARGUMENT, "the handle is not alive");
    if (comm->group->error != NCCL_SUCCESS) return warn(comm->group->error, comm->group->reason);
    if (comm->device->error != CUDA_SUCCESS) return warn(NCCL_UNHANDLED_CUDA_ERROR, "the device is lost");
    if (comm->group->joined < comm->group->ranks.size() || comm->questions != 0) {
        return warn(NCCL_INVALID_ARGUMENT, "an earlier call is in progress");
    }
    if (comm->finalised) return warn(NCCL_INVALID_USAGE, "the handle was finalised");
    if (find_stream(*comm->device, stream_handle, stream) != CUDA_SUCCESS) {
        return warn(NCCL_INVALID_ARGUMENT, "the stream is not one of the device");
    }
    if (stream->capture != nullptr) return warn(NCCL_INVALID_USAGE, "captures are not modelled");
    return NCCL_SUCCESS;
}

// Requests work on a handle.
NcclResult ask(const std::shared_ptr<NcclComm>& comm, const std::shared_ptr<Stream>& stream,
               std::function<Fault()> work) {
    comm->asked.emplace_back(stream, std::move(work));
    comm->outstanding++;
    comm->questions = questions_until_issued;
    return NCCL_IN_PROGRESS;
}

// Starts a collective of all ranks, outside of ncclGroupStart.
template <typename Work>
NcclResult collective(NcclComm* handle, CUstream stream_handle, std::string call, const void* from, size_t from_bytes,
                      void* to, size_t to_bytes, Work work) {
    Call entry;
    if (opened.depth > 0) return opened.error = warn(NCCL_INVALID_USAGE, "collectives in a group are not modelled");
    std::shared_ptr<NcclComm> comm;
    std::shared_ptr<Stream> stream;
    if (const NcclResult code = enter(handle, stream_handle, comm, stream); code != NCCL_SUCCESS) return code;
    if ((from_bytes > 0 && !one_of_memory(*comm->device, from, from_bytes)) ||
        (to_bytes > 0 && !one_of_memory(*comm->device, to, to_bytes))) {
        return warn(NCCL_INVALID_ARGUMENT, call + ": the memory is not of the device");
    }
    const Piece piece{reinterpret_cast<uintptr_t>(from), reinterpret_cast<uintptr_t>(to), from_bytes};
    const uint64_t number = comm->meetings++;
    return ask(comm, stream, [=] {
        return meet(comm, number, call, piece, std::pair{from_bytes, to_bytes}, work);
    });
}

NcclResult transfer(bool sends, const void* pointer, size_t count, int type, int peer, NcclComm* handle,
                    CUstream stream_handle) {
    Call entry;
    const auto refused = [](NcclResult code) {
        if (opened.depth > 0) opened.error = code;
        return code;
    };
    std::shared_ptr<NcclComm> comm;
    std::shared_ptr<Stream> stream;
    if (const NcclResult code = enter(handle, stream_handle, comm, stream); code != NCCL_SUCCESS) return refused(code);
    const size_t bytes = count * bytes_of(type);
    const auto number = static_cast<int>(comm->group->ranks.size());
    if (bytes_of(type) == 0 || peer < 0 || peer >= number || !one_of_memory(*comm->device, pointer, bytes)) {
        return refused(warn(NCCL_INVALID_ARGUMENT, "a transfer of a wrong type, rank or memory"));
    }
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    const Transfer asked{sends, peer, sends ? Piece{at, 0, bytes} : Piece{0, at, bytes}};
    if (opened.depth == 0) {
        return ask(comm, stream, [=] { return exchange(comm, {asked}); });
    }
    auto& all = opened.asked;
    const auto known = std::find_if(all.begin(), all.end(), [&](const Asked& it) { return it.comm == comm; });
    if (known == all.end()) {
        all.push_back({comm, stream, {asked}});
    } else if (known->stream == stream) {
        known->transfers.push_back(asked);
    } else {
        return refused(warn(NCCL_INVALID_USAGE, "several streams in one group are not modelled"));
    }
    return NCCL_SUCCESS;
}

// Removes a handle, whose work has ended or must end.
void forget(const std::shared_ptr<NcclComm>& comm, NcclComm* handle) {
    ranks().live.erase(handle);
    comm->asked.clear();
    comm->group->left++;
    state().progress.notify_all();
}

// Adds a handle to its group, and fails the group if its ranks do not match.
void join(const std::shared_ptr<NcclComm>& comm, size_t count) {
    NcclGroup& group = *comm->group;
    if (group.ranks.empty()) group.ranks.resize(count);
    auto& place = group.ranks[static_cast<size_t>(comm->rank) % group.ranks.size()];
    if (group.ranks.size() != count || place != nullptr) {
        return fail(group, NCCL_INVALID_USAGE, "ranks differ in their number, or two have one number");
    }
    for (const auto& other : group.ranks) {
        if (other != nullptr && other->device == comm->device) {
            return fail(group, NCCL_INVALID_USAGE, "duplicate GPU: two ranks on one device");
        }
    }
    place = comm;
    group.joined++;
}

}  // namespace

namespace kvdouble {

int live_comms(const Device& device) {
    const auto& live = ranks().live;
    return static_cast<int>(
        std::count_if(live.begin(), live.end(), [&](const auto& entry) { return entry.second->device == &device; }));
}

void drop_comms(const Device& device) {
    for (const auto& [handle, comm] : std::map(ranks().live)) {
        if (comm->device != &device) continue;
        comm->aborted = true;
        forget(comm, handle);
    }
}

}  // namespace kvdouble

KV_API NcclResult ncclGetVersion(int* version) {
    KV_ENTER(ncclGetVersion);
    if (version == nullptr) return NCCL_INVALID_ARGUMENT;
    const char* text = std::getenv("KV_DOUBLE_NCCL");
    *version = text == nullptr || *text == 0 ? 22800 : std::atoi(text);
    return NCCL_SUCCESS;
}

KV_API const char* ncclGetErrorString(NcclResult code) {
    constexpr const char* texts[] = {"no error",         "unhandled cuda error", "unhandled system error",
                                     "internal error",   "invalid argument",     "invalid usage",
                                     "remote process exited or there was a network error",
                                     "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

KV_API const char* ncclGetLastError(NcclComm* handle) {
    static thread_local std::string copy;
    Call call;
    const auto comm = find(handle);
    copy = comm != nullptr && comm->group->error != NCCL_SUCCESS ? "test double: " + comm->group->reason : last_warning;
    return copy.c_str();
}

KV_API NcclResult ncclGetUniqueId(NcclUniqueId* id) {
    KV_ENTER(ncclGetUniqueId);
    Call call;
    if (id == nullptr) return NCCL_INVALID_ARGUMENT;
    id->bytes.fill(0x5a);
    const uint64_t number = ++ranks().ids;
    std::memcpy(id->bytes.data(), &number, sizeof number);
    ranks().groups[id->bytes] = std::make_shared<NcclGroup>();
    return NCCL_SUCCESS;
}

KV_API NcclResult ncclCommInitRankConfig(NcclComm** result, int count, NcclUniqueId id, int rank, NcclConfig* config) {
    KV_ENTER(ncclCommInitRankConfig);
    Call call;
    if (result == nullptr || count < 1 || rank < 0 || rank >= count) return NCCL_INVALID_ARGUMENT;
    *result = nullptr;
    if (config == nullptr || config->magic != NCCL_MAGIC || config->size < offsetof(NcclConfig, share) + sizeof(int) ||
        config->version < 21400 || config->blocking != 0) {
        return warn(NCCL_INVALID_ARGUMENT, "the configuration is not filled, or it asks for calls that block");
    }
    const auto group = ranks().groups.find(id.bytes);
    if (group == ranks().groups.end()) return warn(NCCL_INVALID_ARGUMENT, "nobody made this name");
    Device* device = nullptr;
    if (call.current(device) != CUDA_SUCCESS) return NCCL_UNHANDLED_CUDA_ERROR;
    auto comm = std::make_shared<NcclComm>();
    comm->device = device;
    comm->group = group->second;
    comm->rank = rank;
    comm->questions = questions_until_issued;
    ranks().live[comm.get()] = comm;
    join(comm, static_cast<size_t>(count));
    if (opened.depth > 0) {
        opened.joins.emplace_back(result, comm.get());
        return NCCL_SUCCESS;
    }
    *result = comm.get();
    return NCCL_IN_PROGRESS;
}

// Queries of the state make the requested work progress.
KV_API NcclResult ncclCommGetAsyncError(NcclComm* handle, NcclResult* code) {
    KV_ENTER(ncclCommGetAsyncError);
    Call call;
    const auto comm = find(handle);
    if (comm == nullptr || code == nullptr) return NCCL_INVALID_ARGUMENT;
    NcclGroup& group = *comm->group;
    *code = group.error;
    if (group.error != NCCL_SUCCESS) return NCCL_SUCCESS;
    *code = NCCL_IN_PROGRESS;
    if (group.joined < group.ranks.size()) return NCCL_SUCCESS;
    if (comm->questions > 0 && --comm->questions > 0) return NCCL_SUCCESS;
    for (auto& [stream, work] : comm->asked) enqueue(stream, {Op::Kind::work, std::move(work), nullptr});
    comm->asked.clear();
    if (comm->finalised && comm->outstanding > 0) return NCCL_SUCCESS;
    *code = NCCL_SUCCESS;
    return NCCL_SUCCESS;
}

KV_API NcclResult ncclCommFinalize(NcclComm* handle) {
    KV_ENTER(ncclCommFinalize);
    Call call;
    const auto comm = find(handle);
    if (comm == nullptr || comm->finalised) return NCCL_INVALID_ARGUMENT;
    comm->finalised = true;
    comm->questions = questions_until_issued;
    return NCCL_IN_PROGRESS;
}

KV_API NcclResult ncclCommDestroy(NcclComm* handle) {
    KV_ENTER(ncclCommDestroy);
    Call call;
    const auto comm = find(handle);
    if (comm == nullptr) return NCCL_INVALID_ARGUMENT;
    forget(comm, handle);
    state().progress.wait(call.lock, [&] { return comm->group->left >= comm->group->joined; });
    return NCCL_SUCCESS;
}

// The other ranks are not notified: they wait until they abort, too.
KV_API NcclResult ncclCommAbort(NcclComm* handle) {
    KV_ENTER(ncclCommAbort);
    Call call;
    const auto comm = find(handle);
    if (comm == nullptr) return NCCL_INVALID_ARGUMENT;
    comm->aborted = true;
    forget(comm, handle);
    return NCCL_SUCCESS;
}

KV_API NcclResult ncclGroupStart() {
    KV_ENTER(ncclGroupStart);
    opened.depth++;
    return NCCL_SUCCESS;
}

// If the end is refused, no group stays open, and no handle is left.
KV_API NcclResult ncclGroupEnd() {
    CUresult refused = CUDA_SUCCESS;
    const bool is_planned = planned("ncclGroupEnd", refused);
    Call call;
    if (is_planned) {
        for (const auto& [place, comm] : opened.joins) {
            if (const auto known = find(comm)) forget(known, comm);
        }
        opened = Opened{};
        return refused;
    }
    if (opened.depth == 0) return warn(NCCL_INVALID_USAGE, "ncclGroupEnd without a start");
    if (--opened.depth > 0) return NCCL_SUCCESS;
    const Opened all = opened;
    opened = Opened{};
    for (const auto& [place, comm] : all.joins) *place = comm;
    if (all.error != NCCL_SUCCESS) return all.error;
    for (const Asked& asked : all.asked) {
        ask(asked.comm, asked.stream, [comm = asked.comm, transfers = asked.transfers] { return exchange(comm, transfers); });
    }
    return !all.joins.empty() || !all.asked.empty() ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
}

KV_API NcclResult ncclBroadcast(const void* from, void* to, size_t count, int type, int root, NcclComm* handle,
                                CUstream stream) {
    KV_ENTER(ncclBroadcast);
    const size_t bytes = count * bytes_of(type);
    int rank = 0;
    {
        Call call;
        const auto comm = find(handle);
        if (comm == nullptr || root < 0 || root >= static_cast<int>(comm->group->ranks.size()) || bytes_of(type) == 0) {
            return warn(NCCL_INVALID_ARGUMENT, "a broadcast of a wrong type or root");
        }
        rank = comm->rank;
    }
    const std::string call = "a broadcast of " + std::to_string(bytes) + " bytes from rank " + std::to_string(root);
    return collective(handle, stream, call, from, rank == root ? bytes : 0, to, bytes, [=](const auto& pieces) {
        const Piece& source = pieces[static_cast<size_t>(root)];
        for (const Piece& piece : pieces) {
            if (piece.to == source.from) continue;
            std::memmove(reinterpret_cast<void*>(piece.to), reinterpret_cast<void*>(source.from), bytes);
        }
    });
}

KV_API NcclResult ncclAllGather(const void* from, void* to, size_t count, int type, NcclComm* handle, CUstream stream) {
    KV_ENTER(ncclAllGather);
    const size_t bytes = count * bytes_of(type);
    size_t number = 0;
    {
        Call call;
        const auto comm = find(handle);
        if (comm == nullptr || bytes_of(type) == 0) return warn(NCCL_INVALID_ARGUMENT, "an all-gather of a wrong type");
        number = comm->group->ranks.size();
        const auto source = reinterpret_cast<uintptr_t>(from), target = reinterpret_cast<uintptr_t>(to);
        const bool in_place = source == target + static_cast<size_t>(comm->rank) * bytes;
        if (!in_place && source < target + number * bytes && target < source + bytes) {
            return warn(NCCL_INVALID_ARGUMENT, "an all-gather from a part of its target that is another rank's");
        }
    }
    const std::string call = "an all-gather of " + std::to_string(bytes) + " bytes";
    return collective(handle, stream, call, from, bytes, to, number * bytes, [=](const auto& pieces) {
        for (const Piece& target : pieces) {
            for (size_t rank = 0; rank < pieces.size(); rank++) {
                std::memmove(reinterpret_cast<void*>(target.to + rank * bytes),
                             reinterpret_cast<void*>(pieces[rank].from), bytes);
            }
        }
    });
}

KV_API NcclResult ncclAllReduce(const void* from, void* to, size_t count, int type, int op, NcclComm* handle,
                                CUstream stream) {
    KV_ENTER(ncclAllReduce);
    const size_t bytes = count * bytes_of(type);
    if (bytes_of(type) == 0 || type == NCCL_UINT8 || (op != NCCL_SUM && op != NCCL_MIN && op != NCCL_MAX)) {
        return warn(NCCL_INVALID_ARGUMENT, "a reduction of a wrong type or operator");
    }
    const std::string call = "an all-reduce (" + std::to_string(op) + ") of " + std::to_string(count) +
                             " elements of type " + std::to_string(type);
    return collective(handle, stream, call, from, bytes, to, bytes,
                      [=](const auto& pieces) { reduce_all(pieces, type, op); });
}

KV_API NcclResult ncclSend(const void* from, size_t count, int type, int peer, NcclComm* handle, CUstream stream) {
    KV_ENTER(ncclSend);
    return transfer(true, from, count, type, peer, handle, stream);
}

KV_API NcclResult ncclRecv(void* to, size_t count, int type, int peer, NcclComm* handle, CUstream stream) {
    KV_ENTER(ncclRecv);
    return transfer(false, to, count, type, peer, handle, stream);
}
