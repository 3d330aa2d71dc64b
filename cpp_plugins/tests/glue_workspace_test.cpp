// The attention plugin's scratch memory, without TensorRT: its request is enough for every call of every profile, and
// it passes on the size it was given. On the emulated kernels. Prints what failed; exits 0 only when nothing did.

#include "glue_support.h"

namespace {

struct Extents {
    int32_t hq, hkv, d, s, max_batch, max_tree;
};

ddtree::TreeAttention call_of(const Extents& x, int32_t n, int32_t t) {
    ddtree::TreeAttention call{};
    call.sequences = n, call.tokens = t, call.q_heads = x.hq, call.kv_heads = x.hkv, call.head_dim = x.d;
    call.slots = x.max_batch, call.capacity = x.s, call.mask_words = (x.max_tree + 31) / 32, call.scale = 0.125f;
    return call;
}

std::vector<DynamicPluginTensorDesc> profile(const Extents& x, int32_t most_tokens) {
    const Attributes a{x.hq, x.hkv, x.d, x.max_tree};
    return dynamic(attention_tensors(a, x.max_batch, most_tokens, x.max_batch, x.s, DataType::kBF16));
}

// For every N and T: the launcher's own need stays within what the plugin asks for, in each of the two profiles an
// engine has, and both ask for the same.
void enough_for_every_call(const Extents& x) {
    const Attributes a{x.hq, x.hkv, x.d, x.max_tree};
    const Owned plugin = create(attention_creator, a.fields(), TensorRTPhase::kBUILD);
    const auto whole = profile(x, x.max_tree), part = profile(x, std::max(1, x.max_tree / 4));
    const size_t bytes = build(*plugin).getWorkspaceSize(whole.data(), 8, &whole[8], 3);
    CHECK(bytes == build(*plugin).getWorkspaceSize(part.data(), 8, &part[8], 3));
    size_t most = 0;
    for (int32_t n = 1; n <= x.max_batch; ++n) {
        for (int32_t t = 1; t <= x.max_tree; ++t) {
            most = std::max(most, ddtree::attention_workspace_bytes(call_of(x, n, t)));
        }
    }
    CHECK(most == bytes);  // and no byte more than the largest call
}

void test_every_call_of_many_shapes() {
    const int32_t heads[][3] = {{32, 8, 128}, {16, 8, 128}, {40, 8, 128}, {8, 8, 64},
                                {14, 2, 64},  {4, 1, 64},   {64, 4, 128}};
    for (const auto& [hq, hkv, d] : heads) {
        for (const int32_t s : {257, 512, 4353, 40960}) {
            for (const int32_t max_batch : {1, 2, 4, 17, 32, 70}) {
                for (const int32_t max_tree : {1, 16, 65, 257}) {
                    enough_for_every_call({hq, hkv, d, s, max_batch, max_tree});
                }
            }
        }
    }
}

// One call of 17 tokens whose keys are cut into parts, and a guard behind its workspace.
struct Call {
    static constexpr int64_t kTokens = 17, kSlots = 3, kRows = 512;
    static constexpr size_t kGuard = 4096;

    explicit Call(int64_t sequences)
        : n(sequences),
          tensors(attention_tensors(a, n, kTokens, kSlots, kRows, DataType::kBF16)),
          q(n * kTokens * a.hq * a.d, 1),
          k(n * kTokens * a.hkv * a.d, 2),
          v(n * kTokens * a.hkv * a.d, 3),
          out(n * kTokens * a.hq * a.d, 6),
          past_k(kSlots * a.hkv * kRows * a.d, 4),
          past_v(kSlots * a.hkv * kRows * a.d, 5) {}

    int32_t enqueue(IPluginV3& plugin, size_t workspace_bytes) {
        workspace.assign(workspace_bytes + kGuard + 16, 0xa5);
        const uintptr_t start = (reinterpret_cast<uintptr_t>(workspace.data()) + 15) / 16 * 16;
        auto* const scratch = reinterpret_cast<unsigned char*>(start);
        const void* inputs[] = {q.data,      k.data,          v.data,          past_k.data,
                                past_v.data, slot_ids.data(), past_len.data(), mask.data()};
        void* outputs[] = {out.data, past_k.data, past_v.data};
        const int32_t status = runtime(plugin).enqueue(tensors.data(), &tensors[8], inputs, outputs, scratch, nullptr);
        CHECK(std::all_of(scratch + workspace_bytes, scratch + workspace_bytes + kGuard,
                          [](auto x) { return x == 0xa5; }));
        return status;
    }
    size_t need() const {
        return ddtree::attention_workspace_bytes(call_of({a.hq, a.hkv, a.d, kRows, kSlots, a.max_tree}, n, kTokens));
    }

    const Attributes a{4, 2, 64, 65, 0, 0.125f};
    int64_t n;
    std::array<PluginTensorDesc, 11> tensors;
    Halves q, k, v, out, past_k, past_v;
    std::vector<int32_t> slot_ids{2, 0, 1}, past_len{460, 7, 64}, mask = std::vector<int32_t>(3 * kTokens * 3, -1);
    std::vector<unsigned char> workspace;
};

// A plan says how much scratch it sets aside. One that sets less aside than this library needs is refused, call by
// call, and nothing is written.
void test_enqueue_passes_on_what_it_was_given() {
    Call call(2);
    CHECK(call.need() > 0);
    for (const int64_t given : {int64_t{0}, int64_t{16}, static_cast<int64_t>(call.need()) - 1}) {
        std::vector<PluginField> fields = call.a.fields();
        fields.emplace_back("workspace_bytes", &given, PluginFieldType::kINT64, 1);
        const Owned plugin = create(attention_creator, fields);
        CHECK(runtime(*plugin).onShapeChange(call.tensors.data(), 8, &call.tensors[8], 3) == 0);
        const std::vector<uint16_t> before(call.out.data,
                                           call.out.data + call.n * Call::kTokens * call.a.hq * call.a.d);
        logger.last.clear();
        CHECK(call.enqueue(*plugin, given) != 0);
        CHECK(logger.last.find("workspace is too small") != std::string::npos);
        CHECK(std::equal(before.begin(), before.end(), call.out.data));
    }
    const int64_t enough = call.need();
    std::vector<PluginField> fields = call.a.fields();
    fields.emplace_back("workspace_bytes", &enough, PluginFieldType::kINT64, 1);
    const Owned plugin = create(attention_creator, fields);
    CHECK(call.enqueue(*plugin, enough) == 0);
}

// A plugin that was given neither shapes nor a size passes on none.
void test_an_unprepared_plugin_refuses() {
    Call call(2);
    const Owned plugin = create(attention_creator, call.a.fields());
    CHECK(call.enqueue(*plugin, 0) != 0);
    CHECK(runtime(*plugin).onShapeChange(call.tensors.data(), 8, &call.tensors[8], 3) == 0);
    CHECK(call.enqueue(*plugin, ddtree::attention_workspace_bound(
                                    call_of({4, 2, 64, Call::kRows, Call::kSlots, 65}, 3, 65))) == 0);
}

// The size that was asked for at build time travels with the plan: through clones, fields and another process.
void test_the_plan_stores_the_size() {
    Call call(3);
    Owned built = create(attention_creator, call.a.fields(), TensorRTPhase::kBUILD);
    const auto described = dynamic(call.tensors);
    CHECK(build(*built).configurePlugin(described.data(), 8, &described[8], 3) == 0);
    const auto asked = static_cast<int64_t>(build(*built).getWorkspaceSize(described.data(), 8, &described[8], 3));
    const Owned copy(built->clone());
    built.reset();
    const PluginFieldCollection* saved = runtime(*copy).getFieldsToSerialize();
    const PluginField& last = saved->fields[saved->nbFields - 1];
    CHECK(std::string("workspace_bytes") == last.name && last.type == PluginFieldType::kINT64);
    CHECK(asked > 0 && *static_cast<const int64_t*>(last.data) == asked);
    const Owned loaded(attention_creator.createPlugin("node", saved, TensorRTPhase::kRUNTIME));
    const Owned attached(runtime(*loaded).attachToContext(nullptr));
    CHECK(call.enqueue(*attached, asked) == 0);
    // A node cannot state a size, and a stored one is a number of bytes.
    CHECK(attention_creator.createPlugin("node", saved, TensorRTPhase::kBUILD) == nullptr);
    std::vector<PluginField> fields = call.a.fields();
    const int64_t negative = -2;
    fields.emplace_back("workspace_bytes", &negative, PluginFieldType::kINT64, 1);
    CHECK(create(attention_creator, fields) == nullptr);
    fields.back().type = PluginFieldType::kINT32;
    CHECK(create(attention_creator, fields) == nullptr);
}

// More sequences than slots would race for rows, and need more than was asked for.
void test_each_sequence_has_a_slot() {
    const Attributes a;
    const Owned plugin = create(attention_creator, a.fields(), TensorRTPhase::kBUILD);
    const auto tensors = attention_tensors(a, 4, 5, 3, 512, DataType::kBF16);
    logger.last.clear();
    CHECK(runtime(*plugin).onShapeChange(tensors.data(), 8, &tensors[8], 3) != 0);
    CHECK(logger.last.find("N = 4 sequences need a cache slot each, found 3") != std::string::npos);
    const auto described = dynamic(tensors);
    CHECK(build(*plugin).configurePlugin(described.data(), 8, &described[8], 3) != 0);
}

}  // namespace

int main() {
    set_logger_finder(&finder);
    test_every_call_of_many_shapes();
    test_enqueue_passes_on_what_it_was_given();
    test_an_unprepared_plugin_refuses();
    test_the_plan_stores_the_size();
    test_each_sequence_has_a_slot();
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
