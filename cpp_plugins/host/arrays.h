// Checks of NumPy's arrays and results as NumPy's arrays, for the Python binding.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddtree/tree.h"

namespace ddtree::binding {

namespace nb = nanobind;

// No dtype and no order constraint: with one, nanobind would silently convert by copying.
using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Output = nb::ndarray<nb::device::cpu>;

template <typename T>
struct DtypeName;
template <>
struct DtypeName<float> {
    static constexpr const char* value = "float32";
};
template <>
struct DtypeName<double> {
    static constexpr const char* value = "float64";
};
template <>
struct DtypeName<uint8_t> {
    static constexpr const char* value = "uint8";
};
template <>
struct DtypeName<int32_t> {
    static constexpr const char* value = "int32";
};
template <>
struct DtypeName<int64_t> {
    static constexpr const char* value = "int64";
};
template <>
struct DtypeName<uint64_t> {
    static constexpr const char* value = "uint64";
};

[[noreturn]] inline void bad_value(const std::string& message) { throw nb::value_error(message.c_str()); }

template <typename Array>
std::string shape_text(const Array& array) {
    std::string text = "[";
    for (size_t i = 0; i < array.ndim(); ++i) {
        text += (i ? ", " : "") + std::to_string(array.shape(i));
    }
    return text + "]";
}

template <typename Array>
bool c_contiguous(const Array& array) {
    if (array.size() == 0) {
        return true;
    }
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0;) {
        if (array.shape(i) != 1 && array.stride(i) != expected) {
            return false;
        }
        expected *= static_cast<int64_t>(array.shape(i));
    }
    return true;
}

// `layout` names the dimensions in the error text, for instance "[L, K]".
template <typename T, typename Array>
auto* checked(const Array& array, const char* name, const char* layout, size_t ndim) {
    if (array.dtype() != nb::dtype<T>()) {
        throw nb::type_error((std::string(name) + " must have dtype " + DtypeName<T>::value).c_str());
    }
    if (array.ndim() != ndim) {
        bad_value(std::string(name) + " must have shape " + layout + ", found " + shape_text(array));
    }
    if (!c_contiguous(array) || reinterpret_cast<uintptr_t>(array.data()) % alignof(T) != 0) {
        bad_value(std::string(name) + " must be C-contiguous and aligned: pass numpy.ascontiguousarray(" + name + ")");
    }
    using Element = std::conditional_t<std::is_same_v<Array, Output>, T, const T>;
    return static_cast<Element*>(array.data());
}

inline int64_t extent(const Input& array, size_t dimension) { return static_cast<int64_t>(array.shape(dimension)); }

inline const int32_t* checked_parents(const Input& array, int32_t least = 0) {
    const int32_t* parents = checked<int32_t>(array, "parents", "[T]", 1);
    if (array.size() == 0) {
        bad_value("parents must have at least one node, the root");
    }
    const int64_t i = ddtree::first_invalid_parent(parents, extent(array, 0), least);
    if (i >= 0) {
        bad_value("parents must be topological (parents[0] == -1, then " + std::to_string(least) +
                  " <= parents[i] < i): parents[" + std::to_string(i) + "] is " + std::to_string(parents[i]));
    }
    return parents;
}

template <typename T>
nb::object to_numpy(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
    nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(data.release(), shape, owner));
}

// A copy of the values.
template <typename T>
nb::object copied(const std::vector<T>& values) {
    std::unique_ptr<T[]> data(new T[values.size()]);
    std::copy(values.begin(), values.end(), data.get());
    return to_numpy(std::move(data), {values.size()});
}

}  // namespace ddtree::binding
