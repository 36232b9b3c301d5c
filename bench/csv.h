// The CSV files of benchmarks: figures are appended, with the day before them.
#pragma once

#include <sys/stat.h>

#include <ctime>
#include <fstream>
#include <string>

#include "replayssm/core/error.h"

namespace replayssm::bench {

// Appends `row` to the file at `path`; one that is new or empty gets a heading of `columns` first. Throws Error if the
// file cannot be written.
inline void append_csv(const std::string& path, const std::string& columns, const std::string& row) {
  struct stat existing;
  const bool is_new = stat(path.c_str(), &existing) != 0 || existing.st_size == 0;
  std::ofstream file(path, std::ios::app);
  if (is_new) file << "date," << columns << '\n';
  char date[16];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof(date), "%Y-%m-%d", std::localtime(&now));
  file << date << ',' << row << '\n';
  file.flush();
  require(file.good(), "csv: cannot write '{}'", path);
}

}  // namespace replayssm::bench
