// The `replayssm` command.
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "apps/command.h"
#include "replayssm/core/version.h"

namespace {

int refuse(const std::string& text) {
  std::fprintf(stderr, "replayssm: %s\n", text.substr(0, text.find('\n')).c_str());
  return replayssm::kRefusedStatus;
}

}  // namespace

int main(int argc, char** argv) {
  int status = 0;
  CLI::App command("Decodes hybrid state-space language models with ReplaySSM.", "replayssm");
  command.set_version_flag("--version", "replayssm " REPLAYSSM_VERSION);
  command.require_subcommand(0, 1);
  replayssm::add_demo(command, status);
  replayssm::add_generate(command, status);
  replayssm::add_info(command);
  replayssm::add_bench(command);
  try {
    command.parse(argc, argv);
    if (command.get_subcommands().empty()) return refuse("expected a subcommand; replayssm --help lists them");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return command.exit(error);
    return refuse(error.what());
  } catch (const std::bad_alloc&) {
    return refuse("out of memory");
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
  return status;
}
