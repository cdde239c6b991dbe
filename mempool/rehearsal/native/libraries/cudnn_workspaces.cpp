// The model of the memory that cuDNN asks for: workspaces, reserve space and the state of random numbers.
#include <algorithm>

#include "libraries/cudnn.hpp"

namespace standin::cudnn {

namespace {

// All constants of the model. A source "measured" is a figure that somebody published or that was recorded on a GPU;
// "derived" follows from the algorithm.
struct Model {
  // Bytes to whose multiple kernels on tensor cores pad the channels of a tensor that they convert. Derived: their loads
  // are of 16 bytes.
  std::size_t channel_bytes = 16;
  // Channels for each group below which cuDNN takes direct kernels for grouped and depthwise convolutions. Derived: one
  // load of half precision has 8 channels.
  std::int64_t grouped_channels = 8;
  // Transformed values of Winograd's algorithm for each value of a tensor, in percent: tiles of 6 x 6 for 4 x 4 outputs.
  // Derived. PyTorch's benchmark tries such plans (pytorch#49207).
  std::size_t winograd_percent = 225;
  // The same for a filter of 3 x 3, which becomes a tile of 6 x 6. Derived.
  std::size_t winograd_filter_percent = 400;
  // Bytes that each allocation within a workspace is rounded up to. Derived: the alignment of CUDA's allocations.
  std::size_t alignment = 256;

  // Values for each step, sequence, layer and unit that a recurrent layer keeps for its backward pass beside its output:
  // the gates of an LSTM and its state, the gates of a GRU and three values more. The outputs of all layers but the last come
  // in addition. Measured on a P100 in 2017 (pytorch#2895): 736,000,000 bytes for an LSTM and 864,000,000 for a GRU. Layers
  // (4), units (320) and steps of all sequences (25,000) are inferred from the counts of parameters and from both sizes; 5
  // and 6 give both exactly. Newer versions of cuDNN are not measured. A plain cell has one gate; derived.
  std::size_t lstm_reserve = 5, gru_reserve = 6, plain_reserve = 1;
  // Bytes of a dropout mask for each output between two layers. Derived: a byte for each value.
  std::size_t dropout_bytes = 1;

  // Bytes of the state of one random number generator, and generators for each multiprocessor. Derived: a state of
  // XORWOW in cuRAND, and the most threads of a multiprocessor.
  std::size_t generator_bytes = 48, generators = 2048;
};
constexpr Model kModel;
constexpr int kPersistentNorm = 2;  // cudnnBatchNormMode_t

std::size_t aligned(std::size_t bytes) { return (bytes + kModel.alignment - 1) / kModel.alignment * kModel.alignment; }

// Bytes of a copy of a tensor with channels last, padded for tensor cores.
std::size_t converted_bytes(const Shape& shape, std::size_t channels_at) {
  const auto channels = static_cast<std::size_t>(std::max<std::int64_t>(shape.sizes[channels_at], 1));
  const std::size_t multiple = std::max<std::size_t>(1, kModel.channel_bytes / element_bytes(shape.data_type));
  return aligned(shape.bytes() / channels * ((channels + multiple - 1) / multiple * multiple));
}

bool has_tensor_cores(int data_type) {
  const int major = settings().major;
  return data_type == kHalf ? major >= 7 : (data_type == kFloat || data_type == kBfloat16) && major >= 8;
}

}  // namespace

std::size_t element_bytes(int data_type) {
  switch (data_type) {
    case kDouble: case 10: case 20: return 8;  // 64-bit integers, complex numbers of two floats
    case kHalf: case kBfloat16: return 2;
    case 3: case 6: case 11: case 12: case 13: case 15: return 1;  // 8-bit integers and floats, booleans
    case 21: return 16;
    default: return 4;
  }
}

std::size_t Shape::elements() const {
  std::size_t all = 1;
  for (const std::int64_t size : sizes) all *= static_cast<std::size_t>(std::max<std::int64_t>(size, 0));
  return all;
}

std::size_t Shape::extent() const {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < sizes.size() && i < strides.size(); ++i) last += (sizes[i] - 1) * strides[i];
  return elements() == 0 ? 0 : static_cast<std::size_t>(last + 1) * element_bytes(data_type);
}

std::vector<Kernels> kernels_for(const Convolution& convolution) {
  std::vector<Kernels> found;
  const Shape &x = convolution.x, &w = convolution.w;
  const bool grouped = x.sizes[1] != w.sizes[1];
  if (has_tensor_cores(x.data_type) && !(grouped && w.sizes[1] < kModel.grouped_channels)) {
    found.push_back(Kernels::tensor_cores);
  }
  found.push_back(Kernels::direct);
  const bool square = w.sizes.size() == 4 && w.sizes[2] == 3 && w.sizes[3] == 3;
  if (square && !grouped && x.data_type != kDouble) found.push_back(Kernels::winograd);
  return found;
}

// Kernels on tensor cores want channels last, so that tensors of another layout are converted in the workspace: all that the
// kernel reads, and its result. Measured on an H100 in single precision: training the convolutional network of tests/gpu,
// PyTorch's allocator held 25.10 GiB. With this workspace the stand-in holds 25.10, without conversion of the result 23.60,
// and without workspaces 21.55. The sum of a filter's gradient is kept in single precision.
std::size_t workspace_bytes(const Convolution& convolution, Kernels kernels) {
  const Shape &x = convolution.x, &w = convolution.w, &y = convolution.y;
  if (kernels == Kernels::direct) return 0;
  if (kernels == Kernels::winograd) {
    return aligned((x.bytes() + y.bytes()) * kModel.winograd_percent / 100) +
           aligned(w.bytes() * kModel.winograd_filter_percent / 100);
  }
  std::size_t bytes = 0;
  if (!x.channels_last()) bytes += converted_bytes(x, 1);
  if (!y.channels_last()) bytes += converted_bytes(y, 1);
  if (!w.channels_last()) bytes += converted_bytes(w, 1);
  if (convolution.pass == Pass::weight_gradient && element_bytes(w.data_type) < 4) bytes += aligned(4 * w.elements());
  return bytes;
}

std::size_t reserve_bytes(const Recurrence& recurrence, std::int64_t steps, std::int64_t batch) {
  const std::size_t each = recurrence.cell == 2 ? kModel.lstm_reserve
                           : recurrence.cell == 3 ? kModel.gru_reserve
                                                  : kModel.plain_reserve;
  const auto places = static_cast<std::size_t>(steps * batch * recurrence.directions);
  const auto layers = static_cast<std::size_t>(recurrence.layers);
  const std::size_t inside = places * layers * each * static_cast<std::size_t>(recurrence.hidden);
  const std::size_t between = places * (layers - 1) * static_cast<std::size_t>(recurrence.output());
  const std::size_t masks = recurrence.dropout > 0 ? aligned(between * kModel.dropout_bytes) : 0;
  return aligned((inside + between) * element_bytes(recurrence.data_type)) + masks;
}

// The matrices once more, and for each sequence and unit of a layer three values for each gate, less one. Fitted to the same
// two measurements as the reserve space (pytorch#2895): 17,730,560 and 13,169,920 bytes, both exact for 100 sequences, which
// is inferred as well.
std::size_t workspace_bytes(const Recurrence& recurrence, std::int64_t, std::int64_t batch) {
  std::int64_t values = recurrence.layers * recurrence.directions * batch * recurrence.hidden * (3 * recurrence.gates() - 1);
  for (std::int64_t layer = 0; layer < recurrence.layers; ++layer) {
    values += recurrence.directions * recurrence.gates() * recurrence.hidden *
              (recurrence.columns(layer) + recurrence.output());
  }
  return static_cast<std::size_t>(values) * element_bytes(recurrence.data_type);
}

std::size_t dropout_state_bytes() {
  return static_cast<std::size_t>(settings().processors) * kModel.generators * kModel.generator_bytes;
}

// Two tables of single precision, forward and backward, with a place for each step and each symbol of a label, and blanks
// around the symbols. Derived.
std::size_t loss_workspace_bytes(std::int64_t steps, std::int64_t batch, std::int64_t label) {
  return aligned(static_cast<std::size_t>(2 * steps * batch * (2 * label + 1)) * sizeof(float));
}

// Persistent kernels for channels last add the sums of all multiprocessors in memory. Derived from such kernels in
// NVIDIA's apex; other kernels have one block for each channel, which needs none.
std::size_t norm_workspace_bytes(const Shape& x, int mode) {
  if (mode != kPersistentNorm || x.sizes.size() < 2) return 0;
  return aligned(2 * static_cast<std::size_t>(x.sizes[1] * settings().processors) * sizeof(float));
}

// One bit for each value tells whether a fused activation let the value pass. Documented.
std::size_t norm_reserve_bytes(const Shape& x, int operations) { return operations == 0 ? 0 : aligned((x.elements() + 7) / 8); }

}  // namespace standin::cudnn
