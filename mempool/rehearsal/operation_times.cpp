// Tells the stand-in for CUDA how long the operations of PyTorch take on a modelled GPU (clock.py). Built on the user's machine
// against the user's torch (compiled_library.py).
//
// A global RecordFunction callback sees each operation of each thread. The innermost operation that launches a kernel takes the
// longer of its products and its bytes, as in mempool/hardware/roofline.py.
#define NDEBUG  // as PyTorch is built: RecordFunction has a field more without
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <dlfcn.h>

#include <array>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace {

// Operations in a nanosecond by kind of number, and bytes.
struct Rates {
  double single, rounded, half, bytes;
} rates;

void (*begin_operation)();
int (*has_launched)();
void (*end_operation)(double);

// How an operation multiplies; for memory, which of its arguments it does not read as a whole.
enum class Kind {
  none, product, convolution, transposed_convolution, convolution_backward, attention, attention_backward, recurrent,
  recurrent_backward, gather, overwrite, shape_only
};

const std::unordered_map<std::string, Kind> kKinds = {
    {"aten::mm", Kind::product},
    {"aten::bmm", Kind::product},
    {"aten::addmm", Kind::product},
    {"aten::addmm_", Kind::product},
    {"aten::baddbmm", Kind::product},
    {"aten::baddbmm_", Kind::product},
    {"aten::_addmm_activation", Kind::product},
    {"aten::_scaled_mm", Kind::product},
    {"aten::cudnn_convolution", Kind::convolution},
    {"aten::cudnn_convolution_relu", Kind::convolution},
    {"aten::cudnn_convolution_add_relu", Kind::convolution},
    {"aten::_conv_depthwise2d", Kind::convolution},
    {"aten::conv_depthwise3d", Kind::convolution},
    {"aten::cudnn_convolution_transpose", Kind::transposed_convolution},
    {"aten::convolution_backward", Kind::convolution_backward},
    {"aten::_efficient_attention_forward", Kind::attention},
    {"aten::_flash_attention_forward", Kind::attention},
    {"aten::_cudnn_attention_forward", Kind::attention},
    {"aten::_scaled_dot_product_cudnn_attention", Kind::attention},
    {"aten::_efficient_attention_backward", Kind::attention_backward},
    {"aten::_flash_attention_backward", Kind::attention_backward},
    {"aten::_cudnn_attention_backward", Kind::attention_backward},
    {"aten::_scaled_dot_product_cudnn_attention_backward", Kind::attention_backward},
    {"aten::_cudnn_rnn", Kind::recurrent},
    {"aten::_cudnn_rnn_backward", Kind::recurrent_backward},
    {"aten::embedding", Kind::gather},
    {"aten::index", Kind::gather},
    {"aten::index_select", Kind::gather},
    {"aten::gather", Kind::gather},
    {"aten::take", Kind::gather},
    {"aten::nll_loss_forward", Kind::gather},
    {"aten::nll_loss2d_forward", Kind::gather},
    {"aten::fill_", Kind::overwrite},
    {"aten::zero_", Kind::overwrite},
    {"aten::copy_", Kind::overwrite},
    {"aten::nll_loss_backward", Kind::shape_only},
    {"aten::nll_loss2d_backward", Kind::shape_only},
};

using Arguments = c10::ArrayRef<const c10::IValue>;

// Bytes of the elements; an expanded dimension has one.
double bytes_of(const at::Tensor& tensor) {
  double bytes = static_cast<double>(tensor.itemsize());
  for (std::int64_t at = 0; at < tensor.dim(); ++at) bytes *= tensor.stride(at) != 0 || tensor.size(at) == 0 ? static_cast<double>(tensor.size(at)) : 1;
  return bytes;
}
bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda() && tensor.layout() == at::kStrided; }

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (is_on_device(value.toTensor())) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) each_tensor(one, visit);
  }
}

// Numbers of an operation that are known before it runs.
struct Operation : at::ObserverContext {
  double bytes = 0, written = 0, gathered = 0, products = 0, per_output = 0;  // products for each element of the output
  double rate = 0;
  std::unordered_set<const c10::TensorImpl*> given;
};

double number(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }
double columns(const at::Tensor& tensor) { return tensor.dim() > 0 ? static_cast<double>(tensor.size(-1)) : 1; }

double rate_of(const at::Tensor& tensor, bool convolves) {
  if (tensor.scalar_type() == at::kDouble) return rates.single / 2;
  if (tensor.itemsize() < 4) return rates.half;
  const bool rounds = convolves ? at::globalContext().allowTF32CuDNN() : at::globalContext().allowTF32CuBLAS();
  return rounds ? rates.rounded : rates.single;
}

const c10::IValue* argument(const c10::FunctionSchema& schema, Arguments values, const char* name) {
  const auto at = schema.argumentIndexWithName(name);
  return at && static_cast<std::size_t>(*at) < values.size() ? &values[static_cast<std::size_t>(*at)] : nullptr;
}
bool is_set(const c10::IValue* value) { return value != nullptr && ((value->isBool() && value->toBool()) || (value->isInt() && value->toInt() != 0)); }

// The scores of attention have as many elements as pairs of a query and a key; a causal mask skips half of these.
double attention_products(const std::string& name, const c10::FunctionSchema& schema, Arguments values) {
  const at::Tensor &query = argument(schema, values, "query")->toTensor(), &key = argument(schema, values, "key")->toTensor();
  const int length = name.find("cudnn") != std::string::npos ? 2 : 1;  // dimension of the words
  const bool causal = is_set(argument(schema, values, "is_causal")) || is_set(argument(schema, values, "custom_mask_type"));
  return 2 * number(query) * static_cast<double>(key.size(length)) * (causal ? 0.5 : 1);
}

// Add the floating-point operations of an operation, and their rate.
void count_products(Operation& into, Kind kind, const std::string& name, const c10::FunctionSchema& schema, Arguments values) {
  std::vector<at::Tensor> tensors;  // single ones
  for (const c10::IValue& value : values)
    if (value.isTensor() && is_on_device(value.toTensor())) tensors.push_back(value.toTensor());
  if (tensors.empty()) return;
  const auto filters = [](const at::Tensor& weight) { return number(weight) / static_cast<double>(weight.size(0)); };
  const bool convolves = kind != Kind::product && kind != Kind::attention && kind != Kind::attention_backward;
  into.rate = rate_of(tensors[0], convolves);
  switch (kind) {
    case Kind::product: {
      const bool adds = name.find("add") != std::string::npos;
      if (tensors.size() >= (adds ? 3u : 2u)) into.products = 2 * number(tensors[adds]) * columns(tensors[adds ? 2 : 1]);
      break;
    }
    case Kind::convolution: into.per_output = 2 * filters(tensors.at(1)); break;
    case Kind::transposed_convolution: into.products = 2 * number(tensors.at(0)) * filters(tensors.at(1)); break;
    case Kind::convolution_backward: {
      const auto mask = argument(schema, values, "output_mask")->toBoolList();
      const at::Tensor& larger = tensors.at(is_set(argument(schema, values, "transposed")) ? 1 : 0);
      into.products = 2 * (mask[0] + mask[1]) * number(larger) * filters(tensors.at(2));
      break;
    }
    case Kind::attention: into.products = 2 * attention_products(name, schema, values); break;
    case Kind::attention_backward: into.products = 5 * attention_products(name, schema, values); break;
    case Kind::recurrent:
    case Kind::recurrent_backward: {
      double weights = 0;
      each_tensor(*argument(schema, values, "weight"), [&](const at::Tensor& one) { weights += number(one); });
      const at::Tensor& input = argument(schema, values, "input")->toTensor();
      into.products = (kind == Kind::recurrent ? 2 : 4) * weights * number(input) / columns(input);
      break;
    }
    default: break;
  }
}

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  begin_operation();
  auto made = std::make_unique<Operation>();
  const auto schema = function.operator_schema();
  const auto values = function.inputs();
  if (!schema) return made;
  const auto found = kKinds.find(schema->name());
  const Kind kind = found == kKinds.end() ? Kind::none : found->second;
  for (std::size_t at = 0; at < values.size() && at < schema->arguments().size(); ++at) {
    const auto* const alias = schema->arguments()[at].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    each_tensor(values[at], [&](const at::Tensor& tensor) {
      const bool is_new = made->given.insert(tensor.unsafeGetTensorImpl()).second;
      if (at == 0 && kind == Kind::gather) made->gathered = bytes_of(tensor);
      else if (is_new && !(writes && (kind == Kind::overwrite || schema->arguments()[at].is_out())) &&
               !(at == 1 && kind == Kind::shape_only)) made->bytes += bytes_of(tensor);
      if (writes) made->written += bytes_of(tensor);
    });
  }
  count_products(*made, kind, schema->name(), *schema, values);
  return made;
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  double nanoseconds = 0;
  if (context != nullptr && has_launched()) {
    Operation& known = *static_cast<Operation*>(context);
    double made = known.written, elements = 0;
    for (const c10::IValue& value : function.outputs()) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!known.given.insert(tensor.unsafeGetTensorImpl()).second) return;
        made += bytes_of(tensor);
        elements += number(tensor);
      });
    }
    const double moved = known.bytes + made + std::min(known.gathered, made);
    const double products = known.products + known.per_output * elements;
    nanoseconds = std::max(moved / rates.bytes, products > 0 ? products / known.rate : 0);
  }
  end_operation(nanoseconds);
}

}  // namespace

// Observe all operations from now on; returns 0 where the stand-in is not in the process.
extern "C" __attribute__((visibility("default"))) int mempool_operation_times_start(double single, double rounded, double half,
                                                                                    double bytes) {
  rates = {single, rounded, half, bytes};
  begin_operation = reinterpret_cast<void (*)()>(dlsym(RTLD_DEFAULT, "mempool_standin_begin_operation"));
  has_launched = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "mempool_standin_has_launched"));
  end_operation = reinterpret_cast<void (*)(double)>(dlsym(RTLD_DEFAULT, "mempool_standin_end_operation"));
  if (begin_operation == nullptr || has_launched == nullptr || end_operation == nullptr) return 0;
  at::addGlobalCallback(
      at::RecordFunctionCallback(begin, end).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
  return 1;
}
