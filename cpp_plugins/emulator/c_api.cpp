// The launchers behind a C interface, for the tests' ctypes: the structures of include/ddtree by
// address, a status back.
#include "ddtree/abi.h"
#include "ddtree/attention.h"
#include "ddtree/delta.h"
#include "ddtree/draft.h"
#include "ddtree/round.h"

#define DDTREE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

[[maybe_unused]] __attribute__((used)) const char kMarker[] = DDTREE_ABI_MARKER;

ddtree::Stream stream_of(void* stream) { return static_cast<ddtree::Stream>(stream); }

}  // namespace

namespace ddtree::emulator {
extern int32_t multiprocessors;
}  // namespace ddtree::emulator

DDTREE_EXPORT void ddtree_emulate_multiprocessors(int32_t count) { ddtree::emulator::multiprocessors = count; }

DDTREE_EXPORT int32_t ddtree_abi() { return DDTREE_ABI; }

DDTREE_EXPORT uint64_t ddtree_attention_workspace_bytes(const ddtree::TreeAttention* call) {
    return ddtree::attention_workspace_bytes(*call);
}

DDTREE_EXPORT int32_t ddtree_tree_attention(const ddtree::TreeAttention* call, void* stream) {
    return static_cast<int32_t>(ddtree::tree_attention(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_draft_top(const ddtree::DraftTop* call, void* stream) {
    return static_cast<int32_t>(ddtree::draft_top(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_build_tree(const ddtree::TreeBuild* call, void* stream) {
    return static_cast<int32_t>(ddtree::device_build_tree(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_packed_mask(const ddtree::PackedMask* call, void* stream) {
    return static_cast<int32_t>(ddtree::device_packed_mask(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_choose(const ddtree::TokenChoice* call, void* stream) {
    return static_cast<int32_t>(ddtree::device_choose(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_commit(const ddtree::RoundCommit* call, void* stream) {
    return static_cast<int32_t>(ddtree::device_commit(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_compact(const ddtree::KvCompact* call, void* stream) {
    return static_cast<int32_t>(ddtree::device_compact(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_delta_tree(const ddtree::DeltaTree* call, void* stream) {
    return static_cast<int32_t>(ddtree::delta_tree(*call, stream_of(stream)));
}

DDTREE_EXPORT int32_t ddtree_delta_commit(const ddtree::DeltaCommit* call, void* stream) {
    return static_cast<int32_t>(ddtree::delta_commit(*call, stream_of(stream)));
}
