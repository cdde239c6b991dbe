// cuDNN's handles, descriptors and single operations: convolutions of the older API, batch norms, pooling, dropout, CTC loss
// and spatial transformers. Functions that only compute and ask for no workspace are generated. A descriptor keeps what
// programs set. Numbers are values of cuDNN's enumerations.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "libraries/cudnn.hpp"

namespace standin::cudnn {

int launch(const Library* library, std::vector<fake::Range> uses) {
  if (library == nullptr) return kBadParam;
  const RuntimeCall call(NAMED("cudnnBackendExecute"));
  fake::Stream* const on = call.refused() != 0 ? nullptr : call.stream(library->stream);
  return on != nullptr && gpu->enqueue(on, fake::Work{nullptr, std::move(uses), nullptr, nullptr}) == 0 ? kSuccess
                                                                                                    : kExecutionFailed;
}

}  // namespace standin::cudnn

using namespace standin;
using namespace standin::cudnn;

namespace {

struct Tensor {
  Shape shape;
};
struct Filter {
  Shape shape;
  int format = 0;  // 1: channels last
};
struct ConvolutionSettings {
  std::vector<int> padding, stride, dilation;
  int mode = 0, compute_type = 0, groups = 1, math = 0;
};
struct Dropout {
  float probability = 0;
  void* states = nullptr;
  unsigned long long seed = 0;
};
struct Activation {
  int mode = 0, propagates_nan = 0;
  double coefficient = 0;
};
struct Pooling {
  int mode = 0, propagates_nan = 0;
  int window[2] = {}, padding[2] = {}, stride[2] = {};
};
struct Loss {
  int compute_type = 0, normalization = 0, gradient = 0, longest = 0;
};
struct Transformer {
  int sampler = 0, data_type = 0;
  std::vector<int> sizes;
};

struct Measured {  // cudnnConvolution*AlgoPerf_t
  int algorithm, status;
  float time;
  std::size_t memory;
  int determinism, math, reserved[3];
};
// Numbers of the algorithms that stand for each family of kernels, in the order of `Kernels`, by pass.
constexpr int kAlgorithms[3][3] = {{1, 0, 7}, {1, 0, 5}, {1, 0, 5}};
constexpr int kTensorMath = 1, kFusedMath = 3, kDeterministic = 1;

template <typename T>
int make(T** into) {
  *into = new T;
  return kSuccess;
}
template <typename T>
int drop(T* made) {
  delete made;
  return kSuccess;
}

std::vector<std::int64_t> packed(const std::vector<std::int64_t>& sizes, bool channels_last) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  std::int64_t stride = channels_last && sizes.size() > 1 ? sizes[1] : 1;
  for (std::size_t i = sizes.size(); i-- > (channels_last ? 2u : 0u);) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  if (channels_last && !sizes.empty()) strides[0] = stride;
  return strides;
}

Convolution convolution_of(Pass pass, const Tensor* x, const Filter* w, const Tensor* y) {
  return {pass, x->shape, w->shape, y->shape};
}

int measure(const Convolution& of, int wanted, int* found, Measured* into) {
  *found = 0;
  for (const Kernels kernels : kernels_for(of)) {
    if (*found >= wanted) break;
    const int algorithm = kAlgorithms[static_cast<int>(of.pass)][static_cast<int>(kernels)];
    const int math = kernels == Kernels::tensor_cores ? kTensorMath : kFusedMath;
    into[*found] = {algorithm, kSuccess, static_cast<float>(1 + *found), workspace_bytes(of, kernels), kDeterministic, math, {}};
    ++*found;
  }
  return kSuccess;
}

int find_workspace(const Convolution& of, int algorithm, std::size_t* bytes) {
  for (const Kernels kernels : kernels_for(of)) {
    if (kAlgorithms[static_cast<int>(of.pass)][static_cast<int>(kernels)] == algorithm) {
      *bytes = workspace_bytes(of, kernels);
      return kSuccess;
    }
  }
  return kUnsupported;
}

}  // namespace

// --- the library

EXPORTED std::size_t cudnnGetVersion() { return static_cast<std::size_t>(settings().cudnn); }
EXPORTED std::size_t cudnnGetMaxDeviceVersion() { return cudnnGetVersion(); }
EXPORTED std::size_t cudnnGetCudartVersion() { return static_cast<std::size_t>(settings().runtime); }
EXPORTED int cudnnGetProperty(int which, int* value) {
  const int version = settings().cudnn;
  const int parts[] = {version / 10000, version / 100 % 100, version % 100};
  if (which < 0 || which > 2) return kBadParam;
  *value = parts[which];
  return kSuccess;
}
EXPORTED const char* cudnnGetErrorString(int code) {
  switch (code) {
    case kSuccess: return "CUDNN_STATUS_SUCCESS";
    case kBadParam: return "CUDNN_STATUS_BAD_PARAM";
    case kUnsupported: return "CUDNN_STATUS_NOT_SUPPORTED";
    case kExecutionFailed: return "CUDNN_STATUS_EXECUTION_FAILED";
    default: return "CUDNN_STATUS_INTERNAL_ERROR";
  }
}
EXPORTED void cudnnGetLastErrorString(char* text, std::size_t bytes) {
  if (bytes > 0) std::snprintf(text, bytes, "the stand-in for cuDNN refused a call");
}
EXPORTED int cudnnCreate(Library** made) { return make(made); }
EXPORTED int cudnnDestroy(Library* library) { return drop(library); }
EXPORTED int cudnnSetStream(Library* library, Handle stream) {
  library->stream = stream;
  return fake::launch_unseen(stream);
}
EXPORTED int cudnnGetStream(const Library* library, Handle* stream) {
  *stream = library->stream;
  return kSuccess;
}

// --- descriptors of tensors and filters

EXPORTED int cudnnCreateTensorDescriptor(Tensor** made) { return make(made); }
EXPORTED int cudnnDestroyTensorDescriptor(Tensor* made) { return drop(made); }
EXPORTED int cudnnSetTensorNdDescriptor(Tensor* tensor, int data_type, int rank, const int* sizes, const int* strides) {
  tensor->shape = {data_type, {sizes, sizes + rank}, {strides, strides + rank}};
  return kSuccess;
}
EXPORTED int cudnnSetTensor4dDescriptor(Tensor* tensor, int format, int data_type, int n, int c, int h, int w) {
  const std::vector<std::int64_t> sizes{n, c, h, w};
  tensor->shape = {data_type, sizes, packed(sizes, format == 1)};
  return kSuccess;
}
EXPORTED int cudnnGetTensorNdDescriptor(const Tensor* tensor, int wanted, int* data_type, int* rank, int* sizes, int* strides) {
  const Shape& shape = tensor->shape;
  *data_type = shape.data_type;
  *rank = static_cast<int>(shape.sizes.size());
  for (int i = 0; i < std::min(wanted, *rank); ++i) {
    sizes[i] = static_cast<int>(shape.sizes[static_cast<std::size_t>(i)]);
    strides[i] = static_cast<int>(shape.strides[static_cast<std::size_t>(i)]);
  }
  return kSuccess;
}
EXPORTED int cudnnGetTensorSizeInBytes(const Tensor* tensor, std::size_t* bytes) {
  *bytes = tensor->shape.extent();
  return kSuccess;
}
EXPORTED int cudnnCreateFilterDescriptor(Filter** made) { return make(made); }
EXPORTED int cudnnDestroyFilterDescriptor(Filter* made) { return drop(made); }
EXPORTED int cudnnSetFilterNdDescriptor(Filter* filter, int data_type, int format, int rank, const int* given) {
  const std::vector<std::int64_t> sizes(given, given + rank);
  filter->shape = {data_type, sizes, packed(sizes, format == 1)};
  filter->format = format;
  return kSuccess;
}
EXPORTED int cudnnGetFilterNdDescriptor(const Filter* filter, int wanted, int* data_type, int* format, int* rank, int* sizes) {
  *data_type = filter->shape.data_type;
  *format = filter->format;
  *rank = static_cast<int>(filter->shape.sizes.size());
  std::copy_n(filter->shape.sizes.begin(), std::min(wanted, *rank), sizes);
  return kSuccess;
}

// --- convolutions of the older API

EXPORTED int cudnnCreateConvolutionDescriptor(ConvolutionSettings** made) { return make(made); }
EXPORTED int cudnnDestroyConvolutionDescriptor(ConvolutionSettings* made) { return drop(made); }
EXPORTED int cudnnSetConvolutionNdDescriptor(ConvolutionSettings* into, int rank, const int* padding, const int* stride,
                                             const int* dilation, int mode, int compute_type) {
  into->padding.assign(padding, padding + rank);
  into->stride.assign(stride, stride + rank);
  into->dilation.assign(dilation, dilation + rank);
  into->mode = mode;
  into->compute_type = compute_type;
  return kSuccess;
}
EXPORTED int cudnnSetConvolutionGroupCount(ConvolutionSettings* into, int groups) {
  into->groups = groups;
  return kSuccess;
}
EXPORTED int cudnnGetConvolutionGroupCount(const ConvolutionSettings* from, int* groups) {
  *groups = from->groups;
  return kSuccess;
}
EXPORTED int cudnnSetConvolutionMathType(ConvolutionSettings* into, int math) {
  into->math = math;
  return kSuccess;
}
EXPORTED int cudnnGetConvolutionMathType(const ConvolutionSettings* from, int* math) {
  *math = from->math;
  return kSuccess;
}
EXPORTED int cudnnGetConvolutionForwardWorkspaceSize(void*, const Tensor* x, const Filter* w, void*, const Tensor* y,
                                                     int algorithm, std::size_t* bytes) {
  return find_workspace(convolution_of(Pass::forward, x, w, y), algorithm, bytes);
}
EXPORTED int cudnnGetConvolutionBackwardDataWorkspaceSize(void*, const Filter* w, const Tensor* y, void*, const Tensor* x,
                                                          int algorithm, std::size_t* bytes) {
  return find_workspace(convolution_of(Pass::data_gradient, x, w, y), algorithm, bytes);
}
EXPORTED int cudnnGetConvolutionBackwardFilterWorkspaceSize(void*, const Tensor* x, const Tensor* y, void*, const Filter* w,
                                                            int algorithm, std::size_t* bytes) {
  return find_workspace(convolution_of(Pass::weight_gradient, x, w, y), algorithm, bytes);
}
EXPORTED int cudnnGetConvolutionForwardAlgorithm_v7(void*, const Tensor* x, const Filter* w, void*, const Tensor* y, int wanted,
                                                    int* found, Measured* into) {
  return measure(convolution_of(Pass::forward, x, w, y), wanted, found, into);
}
EXPORTED int cudnnGetConvolutionBackwardDataAlgorithm_v7(void*, const Filter* w, const Tensor* y, void*, const Tensor* x,
                                                         int wanted, int* found, Measured* into) {
  return measure(convolution_of(Pass::data_gradient, x, w, y), wanted, found, into);
}
EXPORTED int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void*, const Tensor* x, const Tensor* y, void*, const Filter* w,
                                                           int wanted, int* found, Measured* into) {
  return measure(convolution_of(Pass::weight_gradient, x, w, y), wanted, found, into);
}
EXPORTED int cudnnFindConvolutionForwardAlgorithmEx(void*, const Tensor* x, const void*, const Filter* w, const void*, void*,
                                                    const Tensor* y, void*, int wanted, int* found, Measured* into, void*,
                                                    std::size_t) {
  return measure(convolution_of(Pass::forward, x, w, y), wanted, found, into);
}
EXPORTED int cudnnFindConvolutionBackwardDataAlgorithmEx(void*, const Filter* w, const void*, const Tensor* y, const void*, void*,
                                                         const Tensor* x, void*, int wanted, int* found, Measured* into, void*,
                                                         std::size_t) {
  return measure(convolution_of(Pass::data_gradient, x, w, y), wanted, found, into);
}
EXPORTED int cudnnFindConvolutionBackwardFilterAlgorithmEx(void*, const Tensor* x, const void*, const Tensor* y, const void*,
                                                           void*, const Filter* w, void*, int wanted, int* found, Measured* into,
                                                           void*, std::size_t) {
  return measure(convolution_of(Pass::weight_gradient, x, w, y), wanted, found, into);
}

// --- batch norms

EXPORTED int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int mode, int, const Tensor* x, void*, void*, void*,
                                                                      void*, std::size_t* bytes) {
  *bytes = norm_workspace_bytes(x->shape, mode);
  return kSuccess;
}
EXPORTED int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int mode, int, const Tensor* x, void*, void*, void*, void*,
                                                               void*, void*, std::size_t* bytes) {
  *bytes = norm_workspace_bytes(x->shape, mode);
  return kSuccess;
}
EXPORTED int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int operations, void*, const Tensor* x,
                                                                  std::size_t* bytes) {
  *bytes = norm_reserve_bytes(x->shape, operations);
  return kSuccess;
}

// --- activations, pooling and dropout

EXPORTED int cudnnCreateActivationDescriptor(Activation** made) { return make(made); }
EXPORTED int cudnnDestroyActivationDescriptor(Activation* made) { return drop(made); }
EXPORTED int cudnnSetActivationDescriptor(Activation* into, int mode, int propagates_nan, double coefficient) {
  *into = {mode, propagates_nan, coefficient};
  return kSuccess;
}
EXPORTED int cudnnGetActivationDescriptor(const Activation* from, int* mode, int* propagates_nan, double* coefficient) {
  *mode = from->mode;
  *propagates_nan = from->propagates_nan;
  *coefficient = from->coefficient;
  return kSuccess;
}
EXPORTED int cudnnCreatePoolingDescriptor(Pooling** made) { return make(made); }
EXPORTED int cudnnDestroyPoolingDescriptor(Pooling* made) { return drop(made); }
EXPORTED int cudnnSetPooling2dDescriptor(Pooling* into, int mode, int propagates_nan, int height, int width, int down, int right,
                                         int stride_down, int stride_right) {
  *into = {mode, propagates_nan, {height, width}, {down, right}, {stride_down, stride_right}};
  return kSuccess;
}
EXPORTED int cudnnGetPooling2dForwardOutputDim(const Pooling* pooling, const Tensor* x, int* n, int* c, int* h, int* w) {
  const std::vector<std::int64_t>& sizes = x->shape.sizes;
  if (sizes.size() != 4 || pooling->stride[0] <= 0 || pooling->stride[1] <= 0) return kBadParam;
  const auto output = [&](std::size_t i) {
    const int size = static_cast<int>(sizes[i + 2]);
    return 1 + (size + 2 * pooling->padding[i] - pooling->window[i]) / pooling->stride[i];
  };
  *n = static_cast<int>(sizes[0]);
  *c = static_cast<int>(sizes[1]);
  *h = output(0);
  *w = output(1);
  return kSuccess;
}
EXPORTED int cudnnCreateDropoutDescriptor(Dropout** made) { return make(made); }
EXPORTED int cudnnDestroyDropoutDescriptor(Dropout* made) { return drop(made); }
EXPORTED int cudnnDropoutGetStatesSize(void*, std::size_t* bytes) {
  *bytes = dropout_state_bytes();
  return kSuccess;
}
EXPORTED int cudnnDropoutGetReserveSpaceSize(const Tensor* x, std::size_t* bytes) {
  *bytes = x->shape.elements();
  return kSuccess;
}
EXPORTED int cudnnSetDropoutDescriptor(Dropout* into, void*, float probability, void* states, std::size_t,
                                       unsigned long long seed) {
  *into = {probability, states, seed};
  return kSuccess;
}
EXPORTED int cudnnRestoreDropoutDescriptor(Dropout* into, void* library, float probability, void* states, std::size_t bytes,
                                           unsigned long long seed) {
  return cudnnSetDropoutDescriptor(into, library, probability, states, bytes, seed);
}
EXPORTED int cudnnGetDropoutDescriptor(const Dropout* from, void*, float* probability, void** states, unsigned long long* seed) {
  *probability = from->probability;
  *states = from->states;
  *seed = from->seed;
  return kSuccess;
}

// --- CTC loss and spatial transformers

EXPORTED int cudnnCreateCTCLossDescriptor(Loss** made) { return make(made); }
EXPORTED int cudnnDestroyCTCLossDescriptor(Loss* made) { return drop(made); }
EXPORTED int cudnnSetCTCLossDescriptorEx(Loss* into, int compute_type, int normalization, int gradient) {
  *into = {compute_type, normalization, gradient, 0};
  return kSuccess;
}
EXPORTED int cudnnSetCTCLossDescriptor_v9(Loss* into, int compute_type, int normalization, int gradient, int longest) {
  *into = {compute_type, normalization, gradient, longest};
  return kSuccess;
}
// The sizes of the probabilities are steps, batch and symbols.
EXPORTED int cudnnGetCTCLossWorkspaceSize_v8(void*, int, const Loss* loss, const Tensor* probabilities, void*,
                                             std::size_t* bytes) {
  const std::vector<std::int64_t>& sizes = probabilities->shape.sizes;
  if (sizes.size() < 3) return kBadParam;
  *bytes = loss_workspace_bytes(sizes[0], sizes[1], loss->longest > 0 ? loss->longest : kLongestLabel);
  return kSuccess;
}
EXPORTED int cudnnGetCTCLossWorkspaceSize(void*, const Tensor* probabilities, void*, const int*, const int* lengths, const int*,
                                          int, void*, std::size_t* bytes) {
  const std::vector<std::int64_t>& sizes = probabilities->shape.sizes;
  if (sizes.size() < 3 || sizes[1] < 1) return kBadParam;
  *bytes = loss_workspace_bytes(sizes[0], sizes[1], *std::max_element(lengths, lengths + sizes[1]));
  return kSuccess;
}
EXPORTED int cudnnCreateSpatialTransformerDescriptor(Transformer** made) { return make(made); }
EXPORTED int cudnnDestroySpatialTransformerDescriptor(Transformer* made) { return drop(made); }
EXPORTED int cudnnSetSpatialTransformerNdDescriptor(Transformer* into, int sampler, int data_type, int rank, const int* sizes) {
  *into = {sampler, data_type, {sizes, sizes + rank}};
  return kSuccess;
}
