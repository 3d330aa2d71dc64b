// Runs the kernels and the plugin on a GPU without Python or TensorRT, for compute-sanitizer and for graph capture.
//
//   gpu_harness kernels            every kernel on good and on garbage control values, buffers of their exact sizes
//   gpu_harness plugins LIBRARY    the plugin's enqueue, under graph capture, equals the launcher bit for bit
//
// The second needs the TensorRT headers at compile time (DDTREE_WITH_TRT). Exits 0 when all is well.

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ddtree/attention.h"
#include "ddtree/draft.h"
#include "ddtree/round.h"

#ifdef DDTREE_WITH_TRT
#include <NvInferRuntime.h>
#endif

namespace {

int failures = 0;

void expect(bool condition, const std::string& what) {
    if (!condition) {
        ++failures;
        std::printf("failed: %s\n", what.c_str());
    }
}
void cuda(cudaError_t error, const char* what) {
    expect(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

template <typename T>
struct Buffer {  // device memory of exactly this size, so that the sanitizer finds every access beyond it
    explicit Buffer(const std::vector<T>& host) : count(host.size()) {
        cuda(cudaMalloc(&data, count * sizeof(T)), "cudaMalloc");
        cuda(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), "upload");
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
    std::vector<T> read() const {
        std::vector<T> host(count);
        cuda(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "download");
        return host;
    }
    T* data = nullptr;
    size_t count;
};

std::mt19937 generator(1);

std::vector<uint16_t> halves(size_t count) {
    std::vector<uint16_t> values(count);  // finite in bf16 and in fp16
    for (uint16_t& value : values) {
        value = static_cast<uint16_t>((generator() & 0x8000) | (0x3800 + (generator() & 0x7ff)));
    }
    return values;
}
std::vector<int32_t> integers(size_t count, int32_t low, int32_t high) {
    std::vector<int32_t> values(count);
    for (int32_t& value : values) {
        value = std::uniform_int_distribution<int32_t>(low, high)(generator);
    }
    return values;
}
// Valid and absurd values mixed.
std::vector<int32_t> garbage(size_t count, int32_t valid) {
    const int32_t absurd[] = {INT32_MIN, -1, INT32_MAX, 1000000, 1 << 30};
    std::vector<int32_t> values = integers(count, 0, valid);
    for (int32_t& value : values) {
        if (generator() % 2 == 0) {
            value = absurd[generator() % 5];
        }
    }
    return values;
}

struct AttentionShape {
    int32_t n = 2, t = 17, hq = 8, hkv = 2, d = 128, slots = 3, s = 160, splits = 0;
    ddtree::ElementType type = ddtree::ElementType::bf16;
    ddtree::MaskMode mode = ddtree::MaskMode::tree;
};

struct AttentionBuffers {
    AttentionBuffers(const AttentionShape& x, const std::vector<int32_t>& slot_ids_, const std::vector<int32_t>& past_,
                     const std::vector<int32_t>& mask_)
        : q(halves(size_t(x.n) * x.t * x.hq * x.d)),
          k(halves(size_t(x.n) * x.t * x.hkv * x.d)),
          v(halves(size_t(x.n) * x.t * x.hkv * x.d)),
          cache_k(halves(size_t(x.slots) * x.hkv * x.s * x.d)),
          cache_v(halves(size_t(x.slots) * x.hkv * x.s * x.d)),
          out(std::vector<uint16_t>(q.count, 0x7fff)),
          slot_ids(slot_ids_),
          past_len(past_),
          mask(mask_) {
        call.q = q.data, call.k = k.data, call.v = v.data, call.out = out.data;
        call.past_k = call.present_k = cache_k.data;
        call.past_v = call.present_v = cache_v.data;
        call.slot_ids = slot_ids.data, call.past_len = past_len.data, call.tree_mask = mask.data;
        call.sequences = x.n, call.tokens = x.t, call.q_heads = x.hq, call.kv_heads = x.hkv, call.head_dim = x.d;
        call.slots = x.slots, call.capacity = x.s, call.mask_words = (x.t + 31) / 32;
        call.type = x.type, call.mask_mode = x.mode, call.scale = 0.088f, call.splits = x.splits;
        call.workspace_bytes = ddtree::attention_workspace_bytes(call);
        cuda(cudaMalloc(&call.workspace, call.workspace_bytes + 16), "workspace");
    }
    ~AttentionBuffers() { cudaFree(call.workspace); }
    Buffer<uint16_t> q, k, v, cache_k, cache_v, out;
    Buffer<int32_t> slot_ids, past_len, mask;
    ddtree::TreeAttention call{};
};

void ok(ddtree::Status status, const char* what) { expect(status == ddtree::Status::ok, what); }

template <typename Work>
void captured(Work work) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
    expect(work(stream) == 0, "launch under capture");
    cuda(cudaStreamEndCapture(stream, &graph), "end capture");
    cuda(cudaGraphInstantiate(&ready, graph, 0), "instantiate");
    cuda(cudaGraphLaunch(ready, stream), "replay");
    cuda(cudaStreamSynchronize(stream), "replay");
}

void run_kernels() {
    for (const bool good : {true, false}) {
        for (const int32_t t : {1, 17, 65}) {
            for (const int32_t d : {64, 128}) {
                for (const auto type : {ddtree::ElementType::bf16, ddtree::ElementType::fp16}) {
                    for (const int32_t mode : {0, 1, 2}) {
                        AttentionShape x;
                        x.t = t, x.d = d, x.type = type, x.mode = static_cast<ddtree::MaskMode>(mode);
                        x.splits = mode == 1 ? -1 : 0;
                        const size_t words = size_t(x.n) * t * ((t + 31) / 32);
                        AttentionBuffers b(x, good ? std::vector<int32_t>{2, 0} : garbage(2, 2),
                                           good ? std::vector<int32_t>{70, 0} : garbage(2, x.s),
                                           garbage(words, INT32_MAX));
                        ok(ddtree::tree_attention(b.call, nullptr), "tree_attention");
                        cuda(cudaDeviceSynchronize(), "tree_attention");
                        for (const uint16_t value : b.out.read()) {
                            const int mask = type == ddtree::ElementType::bf16 ? 0x7f80 : 0x7c00;
                            if ((value & mask) == mask) {
                                expect(false, "attention output is not finite");
                                break;
                            }
                        }
                    }
                }
            }
        }
        const int32_t n = 3, length = 7, width = 8, tokens = 65;
        std::vector<float> rows(size_t(n) * length * width);
        for (size_t i = 0; i < rows.size(); ++i) {
            const float bad = i % 3 == 0 ? NAN : i % 5 == 0 ? INFINITY : -1e30f;
            rows[i] = good ? -0.5f * static_cast<float>(i % width) : bad;
        }
        Buffer<float> log_probs(rows);
        Buffer<int32_t> candidates(integers(rows.size(), 0, 9)), roots(integers(n, 0, 9)),
            past(good ? integers(n, 0, 9) : garbage(n, 9)), budgets(good ? integers(n, 0, 64) : garbage(n, 64));
        const std::vector<int32_t> empty(size_t(n) * tokens, -7), one_each(n, -7);
        Buffer<int32_t> ids(empty), parents(empty), depths(empty), positions(empty), counts(one_each),
            mask(std::vector<int32_t>(empty.size() * 3, -7));
        const int32_t outlook = 130;
        Buffer<float> weights(std::vector<float>(size_t(n) * outlook, NAN));
        Buffer<int32_t> outlook_depths(std::vector<int32_t>(size_t(n) * outlook, -7));
        ddtree::TreeBuild build{};
        build.log_probs = log_probs.data, build.candidates = candidates.data, build.root_tokens = roots.data;
        build.budgets = budgets.data, build.past_len = past.data, build.token_ids = ids.data;
        build.parents = parents.data, build.depths = depths.data, build.positions = positions.data;
        build.counts = counts.data, build.log_weights = weights.data, build.outlook_depths = outlook_depths.data;
        build.sequences = n, build.positions_l = length, build.candidates_k = width, build.tokens = tokens;
        build.outlook = outlook;
        ok(ddtree::device_build_tree(build, nullptr), "build_tree");
        cuda(cudaDeviceSynchronize(), "build_tree");
        for (const int32_t vocabulary : {1, 1000, 49152}) {
            std::vector<float> row(size_t(n) * vocabulary);
            for (size_t i = 0; i < row.size(); ++i) {
                row[i] = good ? static_cast<float>(generator() % 1000) : i % 3 == 0 ? NAN : -INFINITY;
            }
            const int32_t k = vocabulary < 64 ? vocabulary : 64;
            Buffer<float> logits(row), best(std::vector<float>(size_t(n) * k, NAN));
            Buffer<int32_t> top(std::vector<int32_t>(size_t(n) * k, -7));
            ok(ddtree::draft_top({logits.data, best.data, top.data, n, vocabulary, k, 1}, nullptr), "draft_top");
            cuda(cudaDeviceSynchronize(), "draft_top");
            for (const int32_t id : top.read()) {
                expect(id >= 0 && id < vocabulary, "a candidate outside the vocabulary");
            }
        }
        if (!good) {
            const std::vector<int32_t> bad = garbage(empty.size(), tokens);
            cuda(cudaMemcpy(parents.data, bad.data(), bad.size() * 4, cudaMemcpyHostToDevice), "upload");
        }
        ok(ddtree::device_packed_mask({parents.data, mask.data, n, tokens, 3}, nullptr), "packed_mask");
        Buffer<int32_t> choices(good ? integers(empty.size(), 0, 9) : garbage(empty.size(), 9)),
            sizes(good ? integers(n, 1, tokens) : garbage(n, tokens));
        const int32_t longest = 1 + length;
        Buffer<int32_t> places(good ? std::vector<int32_t>{2, 0, 1} : garbage(n, 3)),
            flags(good ? integers(n, 0, 1) : garbage(n, 1)), before(good ? integers(4 * n, 0, 8) : garbage(4 * n, 9)),
            states(std::vector<int32_t>(4 * 3, -7)),
            told(std::vector<int32_t>(size_t(n) * 2 * (1 + longest + tokens + outlook), -7));
        Buffer<uint16_t> tapped(halves(size_t(n) * tokens * 64)), slab(halves(size_t(4) * 3 * 2 * 80 * 64)),
            waiting(halves(size_t(3) * longest * 64));
        ddtree::RoundCommit commit{};
        commit.parents = parents.data, commit.token_ids = ids.data, commit.choices = choices.data;
        commit.counts = sizes.data, commit.log_weights = weights.data, commit.outlook_depths = outlook_depths.data;
        commit.slot_ids = places.data, commit.holds = commit.active = flags.data, commit.before = before.data;
        commit.tapped = tapped.data, commit.cache = slab.data, commit.waiting = waiting.data;
        commit.states = states.data, commit.result = told.data, commit.sequences = n, commit.tokens = tokens;
        commit.longest = longest, commit.outlook = outlook, commit.planes = 4, commit.slots = 3, commit.kv_heads = 2;
        commit.capacity = 80, commit.waiting_rows = longest, commit.row_bytes = commit.state_bytes = 128;
        ok(ddtree::device_commit(commit, nullptr), "commit");
        cuda(cudaDeviceSynchronize(), "commit");

        const std::vector<uint16_t> rows_before = halves(size_t(4) * 3 * 2 * 40 * 64);
        Buffer<uint16_t> cache(rows_before), replayed(rows_before);
        Buffer<int32_t> slots(good ? std::vector<int32_t>{2, 0} : garbage(2, 2)),
            starts(good ? integers(2, 0, 20) : garbage(2, 40)),
            keep(good ? std::vector<int32_t>{0, 2, 5, -1, 1, 2, 3, 19} : garbage(8, 40)),
            kept(good ? std::vector<int32_t>{3, 4} : garbage(2, 4));
        ddtree::KvCompact compact{cache.data, slots.data, starts.data, keep.data, kept.data, 2, 4, 3, 2, 40, 4, 128};
        ok(ddtree::device_compact(compact, nullptr), "compact");
        cuda(cudaDeviceSynchronize(), "compact");
        compact.cache = replayed.data;
        captured([&](cudaStream_t stream) { return static_cast<int>(ddtree::device_compact(compact, stream)); });
        expect(cache.read() == replayed.read(), "compaction: captured and launched differ");
    }
}

#ifdef DDTREE_WITH_TRT

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

nvinfer1::v_1_0::IPluginCreatorV3One* find_creator(void* library, const std::string& name) {
    using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
    const auto get = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
    int32_t count = 0;
    nvinfer1::IPluginCreatorInterface* const* creators = get == nullptr ? nullptr : get(count);
    for (int32_t i = 0; i < count; ++i) {
        auto* creator = static_cast<nvinfer1::v_1_0::IPluginCreatorV3One*>(creators[i]);
        if (name == creator->getPluginName()) {
            return creator;
        }
    }
    return nullptr;
}

PluginTensorDesc tensor(std::initializer_list<int64_t> values, DataType type) {
    PluginTensorDesc desc{};
    desc.dims.nbDims = static_cast<int32_t>(values.size());
    std::copy(values.begin(), values.end(), desc.dims.d);
    desc.type = type;
    desc.format = nvinfer1::TensorFormat::kLINEAR;
    return desc;
}

// The plugin as an execution context holds it: created for the runtime phase, attached, no engine.
nvinfer1::v_1_0::IPluginV3OneRuntime* attached(void* library, const char* name, std::vector<PluginField> fields) {
    auto* creator = find_creator(library, name);
    expect(creator != nullptr, std::string("creator of ") + name);
    const nvinfer1::PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    auto* plugin = creator->createPlugin("node", &collection, nvinfer1::TensorRTPhase::kRUNTIME);
    expect(plugin != nullptr, std::string("plugin ") + name);
    auto* runtime = static_cast<nvinfer1::v_1_0::IPluginV3OneRuntime*>(
        plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
    auto* context = runtime->attachToContext(nullptr);
    return static_cast<nvinfer1::v_1_0::IPluginV3OneRuntime*>(
        context->getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
}

void run_plugins(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    expect(library != nullptr, library == nullptr ? dlerror() : "");
    if (library == nullptr) {
        return;
    }
    AttentionShape x;
    const std::vector<int32_t> mask = garbage(size_t(x.n) * x.t, INT32_MAX);
    generator.seed(5);
    AttentionBuffers direct(x, {2, 0}, {100, 7}, mask);
    generator.seed(5);
    AttentionBuffers through(x, {2, 0}, {100, 7}, mask);
    ok(ddtree::tree_attention(direct.call, nullptr), "tree_attention");
    cuda(cudaDeviceSynchronize(), "tree_attention");

    const int32_t max_tree = x.t, mode = 0;
    const float scale = direct.call.scale;
    const auto given = static_cast<int64_t>(through.call.workspace_bytes);
    auto* attention = attached(library, "DDTreeAttention",
                               {{"num_q_heads", &x.hq, PluginFieldType::kINT32, 1},
                                {"num_kv_heads", &x.hkv, PluginFieldType::kINT32, 1},
                                {"head_dim", &x.d, PluginFieldType::kINT32, 1},
                                {"max_tree", &max_tree, PluginFieldType::kINT32, 1},
                                {"scale", &scale, PluginFieldType::kFLOAT32, 1},
                                {"mask_mode", &mode, PluginFieldType::kINT32, 1},
                                {"workspace_bytes", &given, PluginFieldType::kINT64, 1}});
    const DataType half = DataType::kBF16, control = DataType::kINT32;
    const PluginTensorDesc q = tensor({x.n, x.t, x.hq, x.d}, half), kv = tensor({x.n, x.t, x.hkv, x.d}, half),
                           cache = tensor({x.slots, x.hkv, x.s, x.d}, half), n = tensor({x.n}, control);
    const PluginTensorDesc in[] = {q, kv, kv, cache, cache, n, n, tensor({x.n, x.t, 1}, control)};
    const PluginTensorDesc out[] = {q, cache, cache};
    const ddtree::TreeAttention& c = through.call;
    const void* inputs[] = {c.q, c.k, c.v, c.past_k, c.past_v, c.slot_ids, c.past_len, c.tree_mask};
    void* outputs[] = {c.out, c.present_k, c.present_v};
    // Once before the capture, as a runtime does: the first launch loads code. It appends the same rows.
    expect(attention->enqueue(in, out, inputs, outputs, c.workspace, nullptr) == 0, "eager enqueue");
    cuda(cudaDeviceSynchronize(), "eager enqueue");
    cuda(cudaMemset(c.out, 0xff, through.out.count * 2), "poison");
    captured([&](cudaStream_t stream) { return attention->enqueue(in, out, inputs, outputs, c.workspace, stream); });
    expect(direct.out.read() == through.out.read(), "attention: plugin and launcher differ");
    expect(direct.cache_k.read() == through.cache_k.read(), "keys: plugin and launcher differ");
    expect(direct.cache_v.read() == through.cache_v.read(), "values: plugin and launcher differ");

    const std::vector<uint16_t> rows = halves(size_t(4) * 3 * 2 * 40 * 64);
    Buffer<uint16_t> launched(rows), moved(rows), replayed(rows);
    Buffer<int32_t> slots(std::vector<int32_t>{2, 0}), starts(std::vector<int32_t>{17, 3}),
        keep(std::vector<int32_t>{0, 2, 5, 3, 1, 4, 6, 30});
    const ddtree::KvCompact call{launched.data, slots.data, starts.data, keep.data, nullptr, 2, 4, 3, 2, 40, 4, 128};
    ok(ddtree::device_compact(call, nullptr), "compact");
    auto* compact = attached(library, "DDTreeKVCompact", {});
    const PluginTensorDesc block = tensor({4, 3, 2, 40, 64}, half), two = tensor({2}, control);
    const PluginTensorDesc compact_in[] = {block, two, two, tensor({2, 4}, control)};
    const auto enqueue = [&](void* present, cudaStream_t stream) {
        const void* given[] = {present, slots.data, starts.data, keep.data};
        return compact->enqueue(compact_in, &block, given, &present, nullptr, stream);
    };
    expect(enqueue(moved.data, nullptr) == 0, "eager enqueue");
    cuda(cudaDeviceSynchronize(), "eager enqueue");
    captured([&](cudaStream_t stream) { return enqueue(replayed.data, stream); });
    expect(moved.read() != rows, "compaction: no row moved");
    expect(launched.read() == moved.read(), "compaction: plugin and launcher differ");
    expect(launched.read() == replayed.read(), "compaction: captured plugin and launcher differ");
}

#endif

}  // namespace

int main(int count, char** arguments) {
    const std::string what = count > 1 ? arguments[1] : "";
    if (what == "kernels") {
        run_kernels();
#ifdef DDTREE_WITH_TRT
    } else if (what == "plugins" && count > 2) {
        run_plugins(arguments[2]);
#endif
    } else {
        std::printf("usage: gpu_harness kernels | plugins LIBRARY\n");
        return 2;
    }
    std::printf("%s: %d failed\n", what.c_str(), failures);
    return failures == 0 ? 0 : 1;
}
