// The TensorRT glue without TensorRT: shapes, types, formats, fields, clones, arity and enqueue, the last on
// the emulated kernels. It needs TensorRT's headers only. Prints what failed; exits 0 only when nothing did.

#include "glue_support.h"

namespace {

void test_identity_and_fields() {
    const Owned plugin = create(attention_creator, Attributes().fields());
    CHECK(plugin != nullptr);
    CHECK(std::string("DDTreeAttention") == core(*plugin).getPluginName());
    CHECK(std::string("1") == core(*plugin).getPluginVersion());
    CHECK(std::string("ddtree") == core(*plugin).getPluginNamespace());
    CHECK(build(*plugin).getTimingCacheID() != nullptr);
    CHECK(std::string("DDTreeAttention") == attention_creator.getPluginName());
    CHECK(std::string("1") == attention_creator.getPluginVersion());
    CHECK(std::string("ddtree") == attention_creator.getPluginNamespace());
    CHECK(attention_creator.getFieldNames()->nbFields == 6);
}

void refused(const std::function<void(Attributes&, std::vector<PluginField>&)>& spoil, const std::string& expected) {
    Attributes a;
    std::vector<PluginField> fields = a.fields();
    spoil(a, fields);
    logger.last.clear();
    CHECK(create(attention_creator, fields) == nullptr);
    ++checks;
    if (logger.last.find(expected) == std::string::npos) {
        ++failures;
        std::printf("expected a message with '%s', found '%s'\n", expected.c_str(), logger.last.c_str());
    }
}

void test_bad_fields() {
    refused([](Attributes& a, auto&) { a.hq = 5; }, "multiple of num_kv_heads");
    refused([](Attributes& a, auto&) { a.hkv = 0; }, "multiple of num_kv_heads");
    refused([](Attributes& a, auto&) { a.d = 96; }, "head_dim must be 64 or 128");
    refused([](Attributes& a, auto&) { a.max_tree = 0; }, "max_tree");
    refused([](Attributes& a, auto&) { a.mode = 3; }, "mask_mode");
    refused([](Attributes& a, auto&) { a.scale = -1.0f; }, "scale");
    refused([](Attributes& a, auto&) { a.scale = std::strtof("nan", nullptr); }, "scale");
    refused([](Attributes&, auto& f) { f.pop_back(); }, "mask_mode is missing");
    refused([](Attributes&, auto& f) { f[0].type = PluginFieldType::kFLOAT32; }, "num_q_heads must be an integer");
    refused([](Attributes&, auto& f) { f[4].type = PluginFieldType::kINT32; }, "scale must be a float");
    refused([](Attributes&, auto& f) { f[1].length = 2; }, "num_kv_heads must have one value");
    refused([](Attributes&, auto& f) { f[1].data = nullptr; }, "num_kv_heads must have one value");
    refused([](Attributes&, auto& f) { f[2].name = "head_size"; }, "unknown attribute 'head_size'");
    refused([](Attributes&, auto& f) { f.clear(); }, "is missing");
    CHECK(attention_creator.createPlugin("node", nullptr, TensorRTPhase::kBUILD) == nullptr);

    // 64-bit and double fields, as a parser may pass them.
    Attributes a;
    std::vector<PluginField> fields = a.fields();
    const int64_t wide = 4;
    const double scale = 0.125;
    fields[0] = {"num_q_heads", &wide, PluginFieldType::kINT64, 1};
    fields[4] = {"scale", &scale, PluginFieldType::kFLOAT64, 1};
    CHECK(create(attention_creator, fields) != nullptr);
    const int64_t huge = int64_t{1} << 40;
    fields[0].data = &huge;
    CHECK(create(attention_creator, fields) == nullptr);
}

void test_serialisation_and_clone() {
    const Attributes a{8, 2, 128, 33, 1, 0.5f};
    Owned first = create(attention_creator, a.fields());
    const Owned copy(first->clone());
    const Owned attached(runtime(*first).attachToContext(nullptr));
    const std::string id = build(*first).getTimingCacheID();
    first.reset();  // copies must not point into their original
    for (IPluginV3* plugin : {copy.get(), attached.get()}) {
        CHECK(plugin != nullptr);
        CHECK(id == build(*plugin).getTimingCacheID());
        const PluginFieldCollection* saved = runtime(*plugin).getFieldsToSerialize();
        CHECK(saved->nbFields == 7);
        const Owned again(attention_creator.createPlugin("node", saved, TensorRTPhase::kRUNTIME));
        CHECK(again != nullptr);
        CHECK(id == build(*again).getTimingCacheID());
        const PluginFieldCollection* twice = runtime(*again).getFieldsToSerialize();
        const std::vector<PluginField> wanted = a.fields();
        for (int32_t i = 0; i < static_cast<int32_t>(wanted.size()); ++i) {
            CHECK(std::string(twice->fields[i].name) == wanted[i].name);
            CHECK(twice->fields[i].type == wanted[i].type && twice->fields[i].length == 1);
            CHECK(std::memcmp(twice->fields[i].data, wanted[i].data, 4) == 0);
        }
    }
}

// DDTreeKVCompact: cache [planes, slots, Hkv, S, D], slot ids and lengths [N], kept rows [N, K].
std::array<PluginTensorDesc, 5> compact_tensors(int64_t planes, int64_t slots, int64_t n, int64_t k, DataType type) {
    const Dims cache = dims({planes, slots, 2, 40, 64});
    const Dims of[] = {cache, dims({n}), dims({n}), dims({n, k}), cache};
    std::array<PluginTensorDesc, 5> tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
        tensors[i] = {of[i], i == 0 || i == 4 ? type : DataType::kINT32, TensorFormat::kLINEAR, 1.0f};
    }
    return tensors;
}

// What follows from a plugin's tensors: outputs are like these inputs, wrong numbers of them are refused, and of every
// position each type and format while all other tensors are as they should be.
template <typename TensorsOf>
void follows_its_tensors(nvinfer1::v_1_0::IPluginCreatorV3One& creator, const std::vector<PluginField>& fields,
                         TensorsOf tensors_of, const std::vector<int>& like) {
    const Owned plugin = create(creator, fields, TensorRTPhase::kBUILD);
    auto& built = build(*plugin);
    const int outputs = static_cast<int>(like.size());
    const int inputs = static_cast<int>(tensors_of(DataType::kBF16).size()) - outputs;
    // Shapes are passed on by identity, so any distinct values will do for expressions.
    std::vector<DimsExprs> shapes(inputs), found(outputs + 1);
    uintptr_t next = 1;
    for (DimsExprs& shape : shapes) {
        shape.nbDims = 4;
        for (int i = 0; i < 4; ++i) {
            shape.d[i] = reinterpret_cast<const nvinfer1::IDimensionExpr*>(next++);
        }
    }
    auto& none = *reinterpret_cast<nvinfer1::IExprBuilder*>(shapes.data());  // never called
    CHECK(built.getNbOutputs() == outputs);
    CHECK(built.getOutputShapes(shapes.data(), inputs, nullptr, 0, found.data(), outputs, none) == 0);
    CHECK(built.getOutputShapes(shapes.data(), inputs - 1, nullptr, 0, found.data(), outputs, none) != 0);
    CHECK(built.getOutputShapes(shapes.data(), inputs, nullptr, 1, found.data(), outputs, none) != 0);
    CHECK(built.getOutputShapes(shapes.data(), inputs, nullptr, 0, found.data(), outputs + 1, none) != 0);
    for (int i = 0; i < outputs; ++i) {
        const DimsExprs& wanted = shapes[like[i]];
        CHECK(found[i].nbDims == wanted.nbDims && std::equal(wanted.d, wanted.d + 4, found[i].d));
    }

    for (const DataType type : {DataType::kBF16, DataType::kHALF}) {
        const auto good = dynamic(tensors_of(type));
        std::vector<DataType> given(inputs), types(outputs + 1);
        std::transform(good.begin(), good.begin() + inputs, given.begin(), [](const auto& d) { return d.desc.type; });
        CHECK(built.getOutputDataTypes(types.data(), outputs, given.data(), inputs) == 0);
        CHECK(std::all_of(types.begin(), types.end() - 1, [&](DataType x) { return x == type; }));
        CHECK(built.getOutputDataTypes(types.data(), outputs, given.data(), inputs + 1) != 0);
        CHECK(built.getOutputDataTypes(types.data(), outputs + 1, given.data(), inputs) != 0);
        for (int position = 0; position < inputs + outputs; ++position) {
            for (const DataType tried : kTypes) {
                for (const TensorFormat format : kFormats) {
                    auto tensors = good;
                    tensors[position].desc.type = tried;
                    tensors[position].desc.format = format;
                    const bool fits = position == 0 ? tried == DataType::kBF16 || tried == DataType::kHALF
                                                    : tried == good[position].desc.type;
                    CHECK(built.supportsFormatCombination(position, tensors.data(), inputs, outputs) ==
                          (fits && format == TensorFormat::kLINEAR));
                }
            }
        }
        for (const int position : {-1, inputs + outputs}) {
            CHECK(!built.supportsFormatCombination(position, good.data(), inputs, outputs));
        }
        CHECK(!built.supportsFormatCombination(0, good.data(), inputs - 1, outputs));
        CHECK(!built.supportsFormatCombination(0, good.data(), inputs, outputs + 1));
    }
}

void test_tensors() {
    const Attributes a;
    follows_its_tensors(attention_creator, a.fields(),
                        [&](DataType type) { return attention_tensors(a, 2, 5, 3, 64, type); }, {0, 3, 4});
    follows_its_tensors(compact_creator, {}, [](DataType type) { return compact_tensors(4, 3, 2, 8, type); }, {0});
}

void test_configuration() {
    const Attributes a;
    const Owned plugin = create(attention_creator, a.fields(), TensorRTPhase::kBUILD);
    const auto tensors = attention_tensors(a, 2, 65, 3, 512, DataType::kBF16);
    auto described = dynamic(tensors);
    CHECK(build(*plugin).configurePlugin(described.data(), 8, &described[8], 3) == 0);
    CHECK(build(*plugin).configurePlugin(described.data(), 8, &described[8], 2) != 0);
    CHECK(runtime(*plugin).onShapeChange(tensors.data(), 8, &tensors[8], 3) == 0);
    described[0].desc.dims.d[1] = described[1].desc.dims.d[1] = described[2].desc.dims.d[1] = -1;  // T not yet known
    CHECK(build(*plugin).configurePlugin(described.data(), 8, &described[8], 3) == 0);

    // Each one dimension off, by input and position; every refusal has a message.
    const int off[][2] = {{0, 2}, {0, 3}, {1, 0}, {1, 1}, {1, 2}, {1, 3}, {2, 0}, {2, 1}, {2, 2}, {2, 3},
                          {3, 1}, {3, 3}, {4, 0}, {4, 1}, {4, 2}, {4, 3}, {5, 0}, {6, 0}, {7, 0}, {7, 1}};
    for (const auto& [input, dimension] : off) {
        auto wrong = tensors;
        wrong[input].dims.d[dimension] += 1;
        logger.last.clear();
        CHECK(runtime(*plugin).onShapeChange(wrong.data(), 8, &wrong[8], 3) != 0);
        CHECK(!logger.last.empty());
    }
    auto narrow = tensors;
    narrow[7].dims.d[2] = 2;
    CHECK(runtime(*plugin).onShapeChange(narrow.data(), 8, &narrow[8], 3) != 0);
    auto flat = tensors;
    flat[6].dims.nbDims = 0;
    CHECK(runtime(*plugin).onShapeChange(flat.data(), 8, &flat[8], 3) != 0);
    const auto large = attention_tensors(a, 2, 66, 3, 512, DataType::kBF16);
    CHECK(runtime(*plugin).onShapeChange(large.data(), 8, &large[8], 3) != 0);
}

void test_attention_enqueue() {
    const Attributes a{4, 2, 64, 65, 0, 0.125f};
    const int64_t n = 2, t = 17, slots = 3, s = 96;
    auto tensors = attention_tensors(a, n, t, slots, s, DataType::kBF16);
    const size_t cache = slots * a.hkv * s * a.d;
    Halves q(n * t * a.hq * a.d, 1), k(n * t * a.hkv * a.d, 2), v(n * t * a.hkv * a.d, 3);
    Halves past_k(cache, 4), past_v(cache, 5), expected_k(cache, 4), expected_v(cache, 5);
    Halves out(n * t * a.hq * a.d, 6), expected(n * t * a.hq * a.d, 7);
    std::vector<int32_t> slot_ids{2, 0}, past_len{60, 7}, mask(n * t * 3, -1);
    const Owned plugin = create(attention_creator, a.fields());
    const auto described = dynamic(tensors);
    Halves workspace(build(*plugin).getWorkspaceSize(described.data(), 8, &described[8], 3) / 2);
    CHECK(runtime(*plugin).onShapeChange(tensors.data(), 8, &tensors[8], 3) == 0);

    const void* inputs[] = {q.data,      k.data,          v.data,          past_k.data,
                            past_v.data, slot_ids.data(), past_len.data(), mask.data()};
    void* outputs[] = {out.data, past_k.data, past_v.data};
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[8], inputs, outputs, workspace.data, nullptr) == 0);

    ddtree::TreeAttention call{};
    call.q = q.data, call.k = k.data, call.v = v.data, call.out = expected.data, call.workspace = workspace.data;
    call.past_k = call.present_k = expected_k.data;
    call.past_v = call.present_v = expected_v.data;
    call.slot_ids = slot_ids.data(), call.past_len = past_len.data(), call.tree_mask = mask.data();
    call.sequences = n, call.tokens = t, call.q_heads = a.hq, call.kv_heads = a.hkv, call.head_dim = a.d;
    call.slots = slots, call.capacity = s, call.mask_words = 3, call.scale = a.scale;
    call.workspace_bytes = ddtree::attention_workspace_bytes(call);
    CHECK(ddtree::tree_attention(call, nullptr) == ddtree::Status::ok);
    CHECK(std::memcmp(out.data, expected.data, n * t * a.hq * a.d * 2) == 0);
    CHECK(std::memcmp(past_k.data, expected_k.data, cache * 2) == 0);
    CHECK(std::memcmp(past_v.data, expected_v.data, cache * 2) == 0);

    // Two buffers are an error at run time, and normal when the builder times a plugin.
    void* apart[] = {out.data, expected_k.data, expected_v.data};
    logger.last.clear();
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[8], inputs, apart, workspace.data, nullptr) != 0);
    CHECK(logger.last.find("present_k") != std::string::npos);
    const Owned built = create(attention_creator, a.fields(), TensorRTPhase::kBUILD);
    CHECK(build(*built).configurePlugin(described.data(), 8, &described[8], 3) == 0);
    CHECK(runtime(*built).enqueue(tensors.data(), &tensors[8], inputs, apart, workspace.data, nullptr) == 0);

    const void* missing[] = {nullptr,     k.data,          v.data,          past_k.data,
                             past_v.data, slot_ids.data(), past_len.data(), mask.data()};
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[8], missing, outputs, workspace.data, nullptr) != 0);
    for (const int i : {0, 1, 2, 7}) {
        tensors[i].dims.d[1] = 0;  // T = 0
    }
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[8], missing, outputs, nullptr, nullptr) == 0);
}

void test_compact_identity_and_clones() {
    CHECK(std::string("DDTreeKVCompact") == compact_creator.getPluginName());
    CHECK(std::string("1") == compact_creator.getPluginVersion());
    CHECK(std::string("ddtree") == compact_creator.getPluginNamespace());
    CHECK(compact_creator.getFieldNames()->nbFields == 0);
    Owned first = create(compact_creator, {});
    const Owned copy(first->clone()), attached(runtime(*first).attachToContext(nullptr));
    const Owned again(
        compact_creator.createPlugin("node", runtime(*first).getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    const Owned without(compact_creator.createPlugin("node", nullptr, TensorRTPhase::kBUILD));
    first.reset();
    for (IPluginV3* plugin : {copy.get(), attached.get(), again.get(), without.get()}) {
        CHECK(plugin != nullptr);
        CHECK(std::string("DDTreeKVCompact") == core(*plugin).getPluginName());
        CHECK(std::string("ddtree") == core(*plugin).getPluginNamespace());
        CHECK(build(*plugin).getTimingCacheID() != nullptr);
        CHECK(build(*plugin).getWorkspaceSize(nullptr, 4, nullptr, 1) == 0);
    }
    logger.last.clear();
    CHECK(create(compact_creator, Attributes().fields()) == nullptr);
    CHECK(logger.last.find("DDTreeKVCompact: takes no attributes") != std::string::npos);
}

void test_compact_configuration() {
    const Owned plugin = create(compact_creator, {}, TensorRTPhase::kBUILD);
    const auto tensors = compact_tensors(4, 3, 2, 8, DataType::kBF16);
    auto described = dynamic(tensors);
    described[0].desc.dims.d[0] = described[4].desc.dims.d[0] = -1;  // planes not yet known
    CHECK(build(*plugin).configurePlugin(described.data(), 4, &described[4], 1) == 0);
    CHECK(build(*plugin).configurePlugin(described.data(), 4, &described[4], 2) != 0);
    CHECK(runtime(*plugin).onShapeChange(tensors.data(), 4, &tensors[4], 1) == 0);
    const auto refused_with = [&](int input, int dimension, int64_t value, const char* words) {
        auto wrong = tensors;
        if (dimension < 0) {
            wrong[input].dims.nbDims = static_cast<int32_t>(value);
        } else {
            wrong[input].dims.d[dimension] = value;
        }
        logger.last.clear();
        CHECK(runtime(*plugin).onShapeChange(wrong.data(), 4, &wrong[4], 1) != 0);
        CHECK(logger.last.find(words) != std::string::npos);
    };
    for (const int input : {0, 1, 2, 3}) {
        refused_with(input, -1, 7, "dimensions, found 7");
    }
    refused_with(2, 0, 3, "dimension 0 of input 2 must be N of slot_ids = 2, found 3");
    refused_with(3, 0, 1, "dimension 0 of input 3 must be N of slot_ids = 2, found 1");
    refused_with(0, 1, 1, "N = 2 sequences need a cache slot each, found 1");
    refused_with(0, 4, 60, "a row of the cache must be a multiple of 16 bytes, found 120");
}

void test_compact_enqueue() {
    const int64_t planes = 4, slots = 3;
    auto tensors = compact_tensors(planes, slots, 2, 5, DataType::kBF16);
    const size_t row = 64, cache = planes * slots * 2 * 40 * row;
    Halves past(cache, 4), expected(cache, 4), apart(cache, 9);
    // What is behind a path repeats its own row: it does not rise, and ends the list.
    std::vector<int32_t> slot_ids{2, 0}, past_len{17, 3}, keep{0, 2, 5, 3, 4, /* */ 1, 4, 6, 30, 36};
    const std::vector<int32_t> kept{3, 5};
    const void* inputs[] = {past.data, slot_ids.data(), past_len.data(), keep.data()};
    void* outputs[] = {past.data};
    const Owned plugin = create(compact_creator, {});
    CHECK(runtime(*plugin).onShapeChange(tensors.data(), 4, &tensors[4], 1) == 0);
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[4], inputs, outputs, nullptr, nullptr) == 0);
    for (int64_t group = 0; group < planes * slots * 2; ++group) {  // [planes, slots, Hkv]
        for (int n = 0; n < 2; ++n) {
            for (int j = 0; j < kept[n] && group / 2 % slots == slot_ids[n]; ++j) {
                uint16_t* rows = expected.data + (group * 40 + past_len[n]) * row;
                std::copy_n(rows + keep[n * 5 + j] * row, row, rows + j * row);
            }
        }
    }
    CHECK(std::memcmp(past.data, expected.data, cache * 2) == 0);

    // Two buffers are an error at run time, and normal when the builder times a plugin.
    void* other[] = {apart.data};
    logger.last.clear();
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[4], inputs, other, nullptr, nullptr) != 0);
    CHECK(logger.last.find("present_cache must be bound to the address of past_cache") != std::string::npos);
    const Owned built = create(compact_creator, {}, TensorRTPhase::kBUILD);
    CHECK(runtime(*built).enqueue(tensors.data(), &tensors[4], inputs, other, nullptr, nullptr) == 0);
    CHECK(std::memcmp(past.data, expected.data, cache * 2) == 0);
    const void* missing[] = {past.data, nullptr, past_len.data(), keep.data()};
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[4], missing, outputs, nullptr, nullptr) != 0);
    tensors[1].dims.d[0] = tensors[2].dims.d[0] = tensors[3].dims.d[0] = 0;  // N = 0
    CHECK(runtime(*plugin).enqueue(tensors.data(), &tensors[4], missing, outputs, nullptr, nullptr) == 0);
}

}  // namespace

int main() {
    set_logger_finder(&finder);
    test_identity_and_fields();
    test_bad_fields();
    test_serialisation_and_clone();
    test_tensors();
    test_configuration();
    test_attention_enqueue();
    test_compact_identity_and_clones();
    test_compact_configuration();
    test_compact_enqueue();
    std::printf("%d checks, %d failed\n", checks, failures);
    return failures == 0 ? 0 : 1;
}
