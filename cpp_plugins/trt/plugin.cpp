#include "plugin.h"

#include <exception>

namespace ddtree::trt {

namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }

void log_error(const std::string& message) noexcept {
    nvinfer1::ILoggerFinder* finder = logger_finder.load();
    nvinfer1::ILogger* logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, message.c_str());
    }
}

int32_t failure(const char* plugin, const std::string& message) noexcept {
    try {
        log_error(std::string(plugin) + ": " + message);
    } catch (const std::exception&) {
        // No memory for a message: the status still reports the failure.
    }
    return -1;
}

const char* text(Status status) noexcept {
    switch (status) {
        case Status::ok:
            return "ok";
        case Status::null_pointer:
            return "a tensor has no address";
        case Status::bad_shape:
            return "impossible extents";
        case Status::unsupported:
            return "no kernel for this head size, type or mask mode";
        case Status::misaligned:
            return "a tensor's address is not a multiple of 16 bytes";
        case Status::workspace_too_small:
            return "the workspace is too small";
        case Status::launch_failed:
            return "CUDA refused the launch";
    }
    return "unknown status";
}

}  // namespace ddtree::trt
