// `DDTreeProduct` as an operator of ONNX Runtime: rows times a weight of 8-bit integers.
#include <algorithm>

#include "ddtree/cpu_product.h"
#include "ort.h"

namespace ddtree::ort {
namespace {

enum Input { X, WEIGHT, SCALE, INPUTS };

struct Kernel {
    static constexpr const char* NAME = "DDTreeProduct";
    static constexpr int TYPES[INPUTS] = {FLOAT, UINT8, FLOAT};
    int64_t fine, parts;

    OrtStatus* create(const OrtKernelInfo* info) {
        if (OrtStatus* status = read(info, {{"fine", &fine}, {"parts", &parts}})) return status;
        return fine < 0 || parts < 0 || (parts & (parts - 1)) ? failed("DDTreeProduct: attributes out of range")
                                                              : nullptr;
    }

    OrtStatus* compute(OrtKernelContext* context) const;
};

OrtStatus* Kernel::compute(OrtKernelContext* context) const {
    Tensor in[INPUTS];
    for (size_t i = 0; i < INPUTS; ++i) {
        if (OrtStatus* status = read(context, i, in[i])) return status;
    }
    cpu::ProductPass pass{in[X].leading(),
                          in[X].last() / (parts ? 2 : 1),
                          in[SCALE].last() - fine,
                          fine,
                          parts,
                          static_cast<const float*>(in[X].data),
                          static_cast<const uint8_t*>(in[WEIGHT].data),
                          static_cast<const float*>(in[SCALE].data),
                          nullptr};
    constexpr int64_t MOST = 65536;  // inputs, so that sums fit 32 bits
    if (in[X].last() != pass.inputs * (parts ? 2 : 1) || pass.inputs < 1 || pass.inputs > MOST ||
        (parts && pass.inputs % parts) || pass.outputs < std::max<int64_t>(fine, 1) ||
        !in[WEIGHT].shape.is({pass.panels(), pass.steps(), cpu::PANEL, cpu::STEP})) {
        return failed("DDTreeProduct: rows, weight and scales do not fit the sizes");
    }
    std::vector<int64_t> shape(in[X].shape.dims, in[X].shape.dims + in[X].shape.count);
    shape.back() = pass.outputs;
    if (OrtStatus* status = output(context, shape, &pass.out)) return status;
    cpu::multiply(pass, parallel_in(context));
    return nullptr;
}

}  // namespace

const Operator* product() { return record<Kernel>(); }

}  // namespace ddtree::ort
