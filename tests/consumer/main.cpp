// Decodes one token with an installed replayssm, as a program outside the tree would: consumer MODEL.
#include <replayssm/model/generation.h>

#include <cstdio>

int main(int, char** argv) {
  replayssm::Device device;
  const replayssm::Model model = replayssm::load_model(argv[1]);
  replayssm::GenerationRequest request;
  request.prompt = model.tokenizer.encode("The return value of the function");
  request.max_new_tokens = 1;
  replayssm::Generation generation(model, device, {request}, {.decoder = replayssm::Decoder::kReplay, .window = 16});
  while (generation.prefill()) continue;
  while (generation.step()) continue;
  std::printf("%s\n", model.tokenizer.decode(generation.tokens(0)).c_str());
  return generation.tokens(0).size() == 1 ? 0 : 1;
}
